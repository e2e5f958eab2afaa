//! Tables of text with aligned columns.

use std::io::Write;

/// Writes rows of cells below their headings, two spaces between columns; columns named in `right` are aligned to
/// the right. Nothing but the headings' row tells an empty table.
///
/// # Errors
/// It cannot be written.
pub fn write_table<const N: usize>(
    out: &mut impl Write,
    headings: [&str; N],
    right: &[usize],
    rows: &[[String; N]],
) -> std::io::Result<()> {
    let count = |text: &str| text.chars().count();
    let width = |column: usize| {
        let cells = rows.iter().map(|row| count(&row[column]));
        cells.chain([count(headings[column])]).max().unwrap_or_default()
    };
    let widths: [usize; N] = std::array::from_fn(width);
    let mut line = |cells: [&str; N]| {
        let mut text = String::new();
        for (column, (cell, width)) in cells.into_iter().zip(widths).enumerate() {
            let space = " ".repeat(width.saturating_sub(count(cell)));
            let gap = if column > 0 { "  " } else { "" };
            match right.contains(&column) {
                true => text.extend([gap, &space, cell]),
                false => text.extend([gap, cell, &space]),
            }
        }
        writeln!(out, "{}", text.trim_end())
    };
    line(headings)?;
    rows.iter().try_for_each(|row| line(std::array::from_fn(|column| row[column].as_str())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut out = Vec::new();
        let rows = [["größe".to_owned(), "1".to_owned()], ["a".to_owned(), "1000".to_owned()]];
        write_table(&mut out, ["name", "n"], &[1], &rows).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "name      n\ngröße     1\na      1000\n");
    }
}
