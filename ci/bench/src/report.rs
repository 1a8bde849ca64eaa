// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The report: `bench.md` for people, `bench.json` for programs, and plots.
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{bail, Result};
use serde::{Deserialize, Serialize};

use crate::figure::{write_json, write_text, Figure, Measurements, Part, Target};
use crate::machine::Machine;
use crate::plots;

/// `bench.json`: what all parts have measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The machine.
    pub machine: Machine,
    /// What a reader has to know.
    pub notes: Vec<String>,
    /// All figures.
    pub figures: Vec<Figure>,
}

/// Makes the report of the files that are in a directory; returns the path of `bench.md`.
///
/// # Errors
/// If there are no figures, or something cannot be read or written.
pub fn make(directory: &Path, notes: Vec<String>) -> Result<PathBuf> {
    let mut report = Report {
        machine: Machine::this(),
        notes,
        figures: Vec::new(),
    };
    for name in Measurements::ALL {
        let path = directory.join(name);
        if path.exists() {
            let part = Measurements::read(&path)?;
            for note in part.notes {
                // The parts between VMs have some in common.
                if !report.notes.contains(&note) {
                    report.notes.push(note);
                }
            }
            report.figures.extend(part.figures);
        }
    }
    if report.figures.is_empty() {
        bail!(
            "nothing was measured yet: no figures in {}",
            directory.display()
        );
    }
    write_json(&directory.join("bench.json"), &report)?;
    let plots = plots::draw(&report, directory)?;
    let path = directory.join("bench.md");
    write_text(&path, &markdown(&report, &plots))?;
    Ok(path)
}

/// A number with three digits that count.
pub fn number(value: f64) -> String {
    let size = value.abs();
    if size >= 10_000.0 {
        let digits = format!("{value:.0}");
        let mut text = String::new();
        for (i, digit) in digits.chars().enumerate() {
            if i > 0 && (digits.len() - i) % 3 == 0 && digit != '-' && !text.ends_with('-') {
                text.push(',');
            }
            text.push(digit);
        }
        text
    } else if size >= 100.0 || size == 0.0 {
        format!("{value:.0}")
    } else if size >= 10.0 {
        format!("{value:.1}")
    } else if size >= 1.0 {
        format!("{value:.2}")
    } else {
        format!("{value:.3}")
    }
}

/// A place on the horizontal axis: sizes as such.
pub fn place(x: f64) -> String {
    if x < 1000.0 && x == x.round() {
        return format!("{x:.0}");
    }
    let units = [(1u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    let whole = x as u64;
    units
        .iter()
        .find(|(size, _)| whole >= *size && whole % size == 0)
        .map_or_else(
            || number(x),
            |(size, unit)| format!("{} {unit}", whole / size),
        )
}

fn target(figure: &Figure) -> String {
    let unit = match figure.peer {
        Some(_) => "×".to_owned(),
        None => format!(" {}", figure.unit),
    };
    match figure.target {
        None => String::new(),
        Some(Target::Min(least)) => format!("≥ {}{unit}", trimmed(least)),
        Some(Target::Max(most)) => format!("≤ {}{unit}", trimmed(most)),
    }
}

/// A number that somebody chose.
fn trimmed(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn verdict(figure: &Figure) -> &'static str {
    match figure.met {
        None => "",
        Some(true) => "met",
        Some(false) => "**not met**",
    }
}

fn name(figure: &Figure) -> String {
    match figure.x {
        None => figure.name.clone(),
        Some(x) => format!("{}: {}", figure.name, place(x)),
    }
}

/// A figure in one line of text.
pub fn line(figure: &Figure) -> String {
    let mut text = format!("{}  {} {}", name(figure), number(figure.value), figure.unit);
    for (name, value) in &figure.percentiles {
        let _ = write!(text, "  {name} {}", number(*value));
    }
    if let (Some(peer), Some(ratio)) = (&figure.peer, figure.ratio) {
        let _ = write!(
            text,
            "  ({} {}: ratio {})",
            peer.name,
            number(peer.value),
            number(ratio)
        );
    }
    if figure.target.is_some() {
        let _ = write!(text, "  target {}: {}", target(figure), verdict(figure));
    }
    text
}

fn markdown(report: &Report, plots: &[(String, String)]) -> String {
    let mut text = String::from("# How fast it is\n\n");
    let _ = writeln!(text, "Measured on {}.\n", report.machine.describe());
    for note in &report.notes {
        let _ = writeln!(text, "{note}\n");
    }
    text.push_str("Repeat it with `cargo xtask bench`. A ratio is the value divided by that of the peer, measured in the same run.\n");

    text.push_str("\n## Targets\n\n| section | what | value | peer | ratio | target | |\n|---|---|---:|---|---:|---:|---|\n");
    for figure in report
        .figures
        .iter()
        .filter(|figure| figure.target.is_some())
    {
        let _ = write!(text, "| {}: {} ", title(figure.part), figure.section);
        row(&mut text, figure, true);
    }
    for part in [Part::Native, Part::Vm] {
        let title = title(part);
        let figures: Vec<&Figure> = report
            .figures
            .iter()
            .filter(|figure| figure.part == part)
            .collect();
        let mut sections: Vec<&str> = Vec::new();
        for figure in &figures {
            if !sections.contains(&figure.section.as_str()) {
                sections.push(&figure.section);
            }
        }
        for section in sections {
            let _ = writeln!(text, "\n## {title}: {section}\n");
            for (plot, about) in plots
                .iter()
                .filter(|(plot, _)| plots::belongs(plot, part, section))
            {
                let _ = writeln!(text, "![{about}]({plot}.svg)\n");
            }
            text.push_str("| what | value | percentiles | peer | ratio | target | |\n|---|---:|---|---|---:|---:|---|\n");
            for figure in figures.iter().filter(|figure| figure.section == section) {
                row(&mut text, figure, false);
            }
        }
    }
    text
}

/// A part, as headings have it.
fn title(part: Part) -> &'static str {
    match part {
        Part::Native => "Native",
        Part::Vm => "Between VMs",
    }
}

/// A row of a table.
fn row(text: &mut String, figure: &Figure, short: bool) {
    let percentiles: Vec<String> = figure
        .percentiles
        .iter()
        .map(|(name, value)| format!("{name} {}", number(*value)))
        .collect();
    let percentiles = if short {
        String::new()
    } else {
        format!(" {} |", percentiles.join(", "))
    };
    let peer = figure
        .peer
        .as_ref()
        .map(|peer| format!("{} {} {}", peer.name, number(peer.value), figure.unit));
    let _ = writeln!(
        text,
        "| {} | {} {} |{percentiles} {} | {} | {} | {} |",
        name(figure),
        number(figure.value),
        figure.unit,
        peer.unwrap_or_default(),
        figure.ratio.map(number).unwrap_or_default(),
        target(figure),
        verdict(figure)
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::Better;

    #[test]
    fn numbers_have_the_digits_that_count() {
        let texts = [
            (0.0, "0"),
            (0.0421, "0.042"),
            (5.678, "5.68"),
            (56.78, "56.8"),
            (567.8, "568"),
            (5678.2, "5678"),
            (56_782.0, "56,782"),
            (1_234_567.0, "1,234,567"),
            (-12_345.0, "-12,345"),
        ];
        for (value, text) in texts {
            assert_eq!(number(value), text);
        }
        assert_eq!(place(4096.0), "4 KiB");
        assert_eq!(place(64.0), "64");
        assert_eq!(place(f64::from(64 << 20)), "64 MiB");
        assert_eq!(place(10_000.0), "10,000");
    }

    #[test]
    fn figures_of_a_name_and_notes_of_several_parts_are_told_apart() {
        let directory = std::env::temp_dir().join(format!("bench-report-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        for (name, section) in [
            (Measurements::VM, "latency"),
            (Measurements::WIRE, "latency over the wire"),
            (Measurements::RXE, "latency with rxe"),
            (Measurements::FRONT_ENDS, "latency by front end"),
        ] {
            let figure = Figure::new(Part::Vm, section, "WRITE 8 B", "µs", Better::Lower, &[8.0]);
            let measured = Measurements {
                notes: vec!["Two guests.".to_owned(), format!("Of {section}.")],
                figures: vec![figure.target(Target::Max(10.0))],
            };
            measured.write(&directory.join(name)).unwrap();
        }
        let path = make(&directory, Vec::new()).unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        std::fs::remove_dir_all(&directory).unwrap();
        assert_eq!(text.matches("Two guests.").count(), 1);
        for section in [
            "latency",
            "latency over the wire",
            "latency with rxe",
            "latency by front end",
        ] {
            let row = format!("| Between VMs: {section} | WRITE 8 B | 8.00 µs |");
            assert_eq!(text.matches(&row).count(), 1, "{text}");
            assert_eq!(text.matches(&format!("Of {section}.")).count(), 1);
        }
    }
}
