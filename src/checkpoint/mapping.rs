//! Mapping a checkpoint's files into memory.

use std::fs::File;
use std::io;
use std::sync::Arc;

use memmap2::{MmapMut, MmapOptions};

/// A file as memory: pages are read when they are first used and shared with every other reader of the file.
///
/// Copy-on-write, although nothing here writes: MLX may use the buffer of an array that nobody else holds for
/// the result of an operation, and would fault on a read-only page. Such a write stays in this process.
pub type MappedFile = Arc<MmapMut>;

/// Maps a whole file.
///
/// # Errors
/// When the system cannot map it (an empty file, a pipe, no address space).
pub fn map_file(file: &File) -> io::Result<MappedFile> {
    // SAFETY: the mapping is private to this process. Another process may change the file under it, which is
    // true of any mapped model; readers check offsets against the mapping's own length.
    let map = unsafe { MmapOptions::new().no_reserve_swap().map_copy(file) }?;
    Ok(Arc::new(map))
}
