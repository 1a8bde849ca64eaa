// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a lane reports: `target/reports/NAME.md` for people, `target/reports/NAME.json` for programs.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use anyhow::Result;
use serde::Serialize;
use serde_json::{Map, Value};

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
    /// Why it failed or was skipped; empty if it passed.
    pub reason: String,
    /// How long it took.
    pub seconds: f64,
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
        Value::Object(object)
    }

    fn markdown(&self) -> String {
        let mut text = format!(
            "# {}\n\n| case | outcome | seconds |\n|---|---|---:|\n",
            self.summary()
        );
        for case in &self.cases {
            let _ = writeln!(
                text,
                "| {} | {} | {:.1} |",
                case.name,
                word(case.outcome),
                case.seconds
            );
        }
        for case in self.cases.iter().filter(|case| !case.reason.is_empty()) {
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
}
