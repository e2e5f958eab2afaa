//! Writing a model as a GGUF file, for the verbs that can.

use std::ops::ControlFlow;
use std::path::Path;

use mlx_bun::quantize::{ConvertError, GgufExportError, GgufFileType, SourceModel, export_gguf};

use crate::interrupt::Interrupt;
use crate::printer::Printer;

/// Writes `source` to `file`; whether it was not interrupted.
///
/// # Errors
/// A model that GGUF has no words for, or a file that cannot be written.
pub fn export(
    source: &SourceModel,
    file: &Path,
    kind: GgufFileType,
    name: &str,
    printer: &Printer,
    interrupt: &Interrupt,
) -> anyhow::Result<bool> {
    interrupt.begin();
    let mut bar = None;
    let result = export_gguf(source, file, kind, name, &mut |progress| {
        bar.get_or_insert_with(|| printer.transfer("Exporting", progress.total)).set(progress.done);
        if interrupt.is_set() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    drop(bar);
    let exported = match result {
        Err(GgufExportError::Weight(ConvertError::Interrupted)) => return Ok(false),
        result => result?,
    };
    let exact = match exported.exact {
        0 => String::new(),
        exact => format!(", {exact} of {} matrices as they were packed", exported.matrices),
    };
    printer.note(&format!(
        "Wrote {} ({}, {:.3} GB{exact})",
        file.display(),
        kind.name(),
        exported.bytes as f64 / 1e9
    ));
    Ok(true)
}

/// What a file calls a model: the last part of its id or path.
pub fn model_name(repo_id: Option<&str>, path: &Path) -> String {
    match repo_id {
        Some(id) => id.rsplit('/').next().unwrap_or(id).to_owned(),
        None => {
            path.file_stem().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
        }
    }
}
