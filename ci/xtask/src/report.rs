// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a lane reports: `target/reports/NAME.md` for people, `target/reports/NAME.json` for
//! programs.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use anyhow::Result;
use serde::Serialize;
use serde_json::{Map, Value};
use virtio_rdma_bench::{Figure, Measurements};

use crate::shell;

/// How a case ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// As it should.
    Passed,
    /// Not as it should.
    Failed,
    /// It could not run here, for a reason that is no fault.
    Skipped,
}

/// One case.
#[derive(Clone, Debug, Serialize)]
pub struct CaseReport {
    /// Unique in its lane.
    pub name: String,
    /// How it ended.
    pub outcome: Outcome,
    /// Why it failed or was skipped, or what there is to say of it though it passed.
    pub reason: String,
    /// How long it took.
    pub seconds: f64,
    /// True if the report's table says it all, unless it failed.
    #[serde(skip)]
    pub tabulated: bool,
}

/// A table: what a lane has to say of many things of a kind.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// The columns in the order of their first use.
    columns: Vec<String>,
    /// The rows in the order of their first use: each with its cells by column.
    rows: Vec<(String, Map<String, Value>)>,
}

impl Table {
    /// Writes a cell.
    pub fn set(&mut self, row: &str, column: &str, text: &str) {
        if !self.columns.iter().any(|known| known == column) {
            self.columns.push(column.to_owned());
        }
        let at = self.rows.iter().position(|(name, _)| name == row);
        let at = at.unwrap_or_else(|| {
            self.rows.push((row.to_owned(), Map::new()));
            self.rows.len() - 1
        });
        if let Some((_, cells)) = self.rows.get_mut(at) {
            cells.insert(column.to_owned(), text.into());
        }
    }

    fn markdown(&self) -> String {
        let line = |first: &str, cells: &mut dyn Iterator<Item = String>| {
            let cells: String = cells.map(|cell| format!(" {cell} |")).collect();
            format!("| {first} |{cells}\n")
        };
        let plain = |text: &str| text.replace('|', "\\|").replace('\n', " ");
        let mut text = line("", &mut self.columns.iter().map(|column| plain(column)));
        text += &format!("|---|{}\n", "---|".repeat(self.columns.len()));
        for (name, cells) in &self.rows {
            let of = |column: &String| {
                let cell = cells.get(column).and_then(Value::as_str);
                plain(cell.unwrap_or_default())
            };
            text += &line(&plain(name), &mut self.columns.iter().map(of));
        }
        text
    }

    fn json(&self) -> Value {
        let rows = self.rows.iter().cloned();
        Value::Object(
            rows.map(|(name, cells)| (name, Value::Object(cells)))
                .collect(),
        )
    }
}

/// One lane.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The lane's name.
    pub name: String,
    /// Its cases in the order in which they ran.
    pub cases: Vec<CaseReport>,
    /// Figures that its cases measured.
    pub figures: Map<String, Value>,
    /// Its table.
    pub table: Table,
    /// Figures of the benchmark. With them the JSON file is also one of the benchmark's.
    pub measured: Measurements,
}

impl Report {
    /// An empty report.
    pub fn new(name: &str) -> Self {
        Report {
            name: name.to_owned(),
            ..Report::default()
        }
    }

    /// How many cases ended so.
    pub fn count(&self, outcome: Outcome) -> usize {
        self.cases
            .iter()
            .filter(|case| case.outcome == outcome)
            .count()
    }

    /// True if cases ran and none failed.
    pub fn good(&self) -> bool {
        self.count(Outcome::Failed) == 0 && self.count(Outcome::Passed) > 0
    }

    /// One line.
    pub fn summary(&self) -> String {
        let [passed, failed, skipped] =
            [Outcome::Passed, Outcome::Failed, Outcome::Skipped].map(|outcome| self.count(outcome));
        format!(
            "lane {}: {passed} passed, {failed} failed, {skipped} skipped",
            self.name
        )
    }

    fn json(&self) -> Value {
        let mut object = Map::new();
        object.insert("name".to_owned(), self.name.clone().into());
        object.insert("passed".to_owned(), self.count(Outcome::Passed).into());
        object.insert("failed".to_owned(), self.count(Outcome::Failed).into());
        object.insert("skipped".to_owned(), self.count(Outcome::Skipped).into());
        object.insert(
            "cases".to_owned(),
            serde_json::to_value(&self.cases).unwrap_or_default(),
        );
        for (key, value) in &self.figures {
            object.entry(key.clone()).or_insert_with(|| value.clone());
        }
        if !self.measured.figures.is_empty() {
            let measured = serde_json::to_value(&self.measured).unwrap_or_default();
            if let Value::Object(measured) = measured {
                object.extend(measured);
            }
        }
        if !self.table.rows.is_empty() {
            object.insert("table".to_owned(), self.table.json());
        }
        Value::Object(object)
    }

    fn markdown(&self) -> String {
        let mut text = format!(
            "# {}\n\n| case | outcome | seconds |\n|---|---|---:|\n",
            self.summary()
        );
        let untold = |case: &&CaseReport| !case.tabulated || case.outcome == Outcome::Failed;
        for case in self.cases.iter().filter(untold) {
            let _ = writeln!(
                text,
                "| {} | {} | {:.1} |",
                case.name,
                word(case.outcome),
                case.seconds
            );
        }
        if !self.table.rows.is_empty() {
            let _ = write!(text, "\n{}", self.table.markdown());
        }
        if !self.measured.figures.is_empty() {
            text += &measured(&self.measured.figures);
        }
        for case in self
            .cases
            .iter()
            .filter(untold)
            .filter(|case| !case.reason.is_empty())
        {
            let _ = write!(
                text,
                "\n## {}: {}\n\n```\n{}\n```\n",
                case.name,
                word(case.outcome),
                case.reason.trim_end()
            );
        }
        if !self.figures.is_empty() {
            text.push_str("\n## Figures\n\n| figure | value |\n|---|---:|\n");
            for (key, value) in &self.figures {
                let _ = writeln!(text, "| {key} | {value} |");
            }
        }
        text
    }

    /// Writes both files.
    pub fn write(&self) -> Result<PathBuf> {
        let dir = directory();
        fs::create_dir_all(&dir)?;
        fs::write(
            dir.join(format!("{}.json", self.name)),
            serde_json::to_string_pretty(&self.json())? + "\n",
        )?;
        let path = dir.join(format!("{}.md", self.name));
        fs::write(&path, self.markdown())?;
        Ok(path)
    }
}

/// Figures of the benchmark as a table.
fn measured(figures: &[Figure]) -> String {
    let mut text = "\n| | at | value | unit | peer | its value | ratio | target |\n|---|---:|---:|---|---|---:|---:|---|\n".to_owned();
    for figure in figures {
        let shown = |number: Option<f64>| {
            number
                .map(|number| format!("{number:.3}"))
                .unwrap_or_default()
        };
        let (peer, theirs) = match &figure.peer {
            Some(peer) => (peer.name.as_str(), Some(peer.value)),
            None => ("", None),
        };
        let target = match figure.met {
            Some(true) => "met",
            Some(false) => "MISSED",
            None => "",
        };
        let _ = writeln!(
            text,
            "| {}: {} | {} | {:.3} | {} | {peer} | {} | {} | {target} |",
            figure.section,
            figure.name,
            figure.x.map(|x| x.to_string()).unwrap_or_default(),
            figure.value,
            figure.unit,
            shown(theirs),
            shown(figure.ratio),
        );
    }
    text
}

/// Where reports go.
pub fn directory() -> PathBuf {
    shell::target().join("reports")
}

/// An outcome as a word.
pub fn word(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Passed => "passed",
        Outcome::Failed => "FAILED",
        Outcome::Skipped => "skipped",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_report_has_the_agreed_keys() {
        let mut report = Report::new("x");
        for (name, outcome) in [
            ("a", Outcome::Passed),
            ("b", Outcome::Failed),
            ("c", Outcome::Skipped),
        ] {
            report.cases.push(CaseReport {
                name: name.to_owned(),
                outcome,
                reason: String::new(),
                seconds: 1.5,
                tabulated: false,
            });
        }
        report.figures.insert("mib_per_s".to_owned(), 7.into());
        report.figures.insert("passed".to_owned(), 99.into());
        let json = report.json();
        assert_eq!(json["passed"], 1);
        assert_eq!(json["failed"], 1);
        assert_eq!(json["skipped"], 1);
        assert_eq!(json["cases"][1]["outcome"], "failed");
        assert_eq!(json["cases"][0]["seconds"], 1.5);
        assert_eq!(json["mib_per_s"], 7);
        assert!(!report.good());
    }
    #[test]
    fn a_report_with_figures_is_a_file_of_the_benchmark() {
        let mut report = Report::new("x");
        let (part, better) = (
            virtio_rdma_bench::Part::Vm,
            virtio_rdma_bench::Better::Lower,
        );
        let figure = Figure::new(part, "latency", "WRITE", "µs", better, &[3.0, 1.0, 2.0]);
        report.measured.figures.push(figure.beside("rxe", &[4.0]));
        report.measured.notes.push("a note".to_owned());
        let read: Measurements = serde_json::from_value(report.json()).expect("the format");
        assert_eq!(read, report.measured);
        assert!(report
            .markdown()
            .contains("| latency: WRITE |  | 2.000 | µs | rxe | 4.000 | 0.500 |  |"));
    }

    #[test]
    fn tables_keep_their_order_and_escape_their_cells() {
        let mut table = Table::default();
        table.set("z", "first", "a|b");
        table.set("a", "second", "two\nlines");
        table.set("z", "second", "x");
        assert_eq!(
            table.markdown(),
            "|  | first | second |\n|---|---|---|\n| z | a\\|b | x |\n| a |  | two lines |\n"
        );
        assert_eq!(table.json()["z"]["second"], "x");
    }

    #[test]
    fn a_tabulated_case_is_listed_only_if_it_failed() {
        let mut report = Report::new("x");
        for (name, outcome) in [("good", Outcome::Passed), ("bad", Outcome::Failed)] {
            report.cases.push(CaseReport {
                name: name.to_owned(),
                outcome,
                reason: "why".to_owned(),
                seconds: 0.0,
                tabulated: true,
            });
        }
        let text = report.markdown();
        assert!(text.contains("| bad | FAILED |") && text.contains("## bad"));
        assert!(!text.contains("good"));
    }
}
