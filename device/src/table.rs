// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables for people.

/// Rows, the first one with heads, in columns as wide as needed: texts begin, and numbers end, in the same place.
pub(crate) fn table(rows: Vec<Vec<String>>) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |at: usize| {
        let cells = rows.iter().filter_map(|row| row.get(at));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..columns).map(width).collect();
    let is_number = |at: usize| {
        let mut cells = rows.iter().skip(1).filter_map(|row| row.get(at));
        cells.all(|cell| cell.starts_with(|first: char| first.is_ascii_digit()))
    };
    let numbers: Vec<_> = (0..columns).map(is_number).collect();
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths).zip(&numbers);
        let cells = cells.map(|((cell, width), number)| match number {
            true => format!("{cell:>width$}"),
            false => format!("{cell:<width$}"),
        });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_needed() {
        let rows = [
            ["NAME", "N", "LAST"],
            ["a", "7", "x"],
            ["long", "1000", "-"],
        ];
        let rows = rows.map(|row| row.map(str::to_owned).to_vec());
        let lines = "NAME     N  LAST\na        7  x\nlong  1000  -\n";
        assert_eq!(table(rows.to_vec()), lines);
        assert_eq!(table(Vec::new()), "");
    }
}
