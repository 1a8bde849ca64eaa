// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is measured, as data. The format of all files of the benchmark:
//!
//! ```json
//! {
//!   "notes": ["what a reader has to know about these measurements, one paragraph each"],
//!   "figures": [
//!     {
//!       "part": "vm",
//!       "section": "latency",
//!       "name": "RDMA WRITE, 8 B",
//!       "unit": "µs",
//!       "better": "lower",
//!       "value": 24.0,
//!       "runs": [24.0, 23.5, 26.1, 24.3, 23.9],
//!       "percentiles": {"p99": 31.0},
//!       "x": null,
//!       "peer": {"name": "rxe", "value": 600.0, "runs": [590.0, 600.0, 620.0, 600.0, 601.0]},
//!       "ratio": 0.0405,
//!       "target": {"max": 0.0667},
//!       "met": true
//!     }
//!   ]
//! }
//! ```
//!
//! `ratio` is the median of the ratios of the repetitions, each to the peer's repetition beside it
//! in time, so that a machine that changes meanwhile does not change it; it is that of the two
//! values only if the peer was repeated less or more often. `percentiles`, `x`, `peer`, `ratio`,
//! `target` and `met` may be missing or null. Whatever has two peers is two figures of the same
//! section and name. Numbers of figures are in the unit that they are shown in.
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Why a file of the benchmark cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refused.
    #[error("cannot access {path}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// It is not of this format.
    #[error("{path} is no file of the benchmark")]
    Format {
        /// The file.
        path: PathBuf,
        /// Where and why.
        #[source]
        source: serde_json::Error,
    },
}

/// Where a figure was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// Without VMs: the real device process, driven from the host at native speed.
    Native,
    /// Between two VMs.
    Vm,
}

/// Which figures are good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// Times.
    Lower,
    /// Rates.
    Higher,
}

/// What a figure is compared with: measured in the same run, in the same unit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peer {
    /// What it is, such as `rxe` or `memcpy`.
    pub name: String,
    /// Median of `runs`.
    pub value: f64,
    /// Each repetition.
    pub runs: Vec<f64>,
}

impl Peer {
    /// From its repetitions.
    #[must_use]
    pub fn new(name: &str, runs: &[f64]) -> Self {
        Self {
            name: name.to_owned(),
            value: median(runs),
            runs: runs.to_vec(),
        }
    }
}

/// What is to be reached: of the ratio to the peer if there is a peer, else of the value.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Target {
    /// At least this.
    Min(f64),
    /// At most this.
    Max(f64),
}

impl Target {
    /// Whether a number reaches it.
    #[must_use]
    pub fn met(self, number: f64) -> bool {
        match self {
            Self::Min(least) => number >= least,
            Self::Max(most) => number <= most,
        }
    }
}

/// One thing that was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// Where.
    pub part: Part,
    /// What kind of thing it is: `latency`, `message rate`, `bandwidth` and the like. A section is
    /// a table of the report.
    pub section: String,
    /// What it is, unique in its section together with `x` and the peer.
    pub name: String,
    /// Unit of all its numbers but `x` and `ratio`.
    pub unit: String,
    /// What to wish for.
    pub better: Better,
    /// Median of `runs`.
    pub value: f64,
    /// Each repetition.
    pub runs: Vec<f64>,
    /// Other statistics of single events, such as `p99`; each is the median of that of the
    /// repetitions.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub percentiles: BTreeMap<String, f64>,
    /// If figures of this section and name are points of a curve: where on the horizontal axis,
    /// such as a size in bytes.
    #[serde(default)]
    pub x: Option<f64>,
    /// What it is compared with.
    #[serde(default)]
    pub peer: Option<Peer>,
    /// Median of `runs` divided by the peer's, one by one.
    #[serde(default)]
    pub ratio: Option<f64>,
    /// What was to be reached.
    #[serde(default)]
    pub target: Option<Target>,
    /// Whether it was.
    #[serde(default)]
    pub met: Option<bool>,
}

impl Figure {
    /// A figure without peer and target.
    #[must_use]
    pub fn new(
        part: Part,
        section: &str,
        name: &str,
        unit: &str,
        better: Better,
        runs: &[f64],
    ) -> Self {
        Self {
            part,
            section: section.to_owned(),
            name: name.to_owned(),
            unit: unit.to_owned(),
            better,
            value: median(runs),
            runs: runs.to_vec(),
            percentiles: BTreeMap::new(),
            x: None,
            peer: None,
            ratio: None,
            target: None,
            met: None,
        }
    }

    /// As a point of a curve.
    #[must_use]
    pub fn at(mut self, x: f64) -> Self {
        self.x = Some(x);
        self
    }

    /// With another statistic, from that of each repetition.
    #[must_use]
    pub fn percentile(mut self, name: &str, runs: &[f64]) -> Self {
        self.percentiles.insert(name.to_owned(), median(runs));
        self
    }

    /// Beside a peer, from its repetitions.
    #[must_use]
    pub fn beside(mut self, name: &str, runs: &[f64]) -> Self {
        let peer = Peer::new(name, runs);
        self.ratio = Some(if self.runs.len() == runs.len() {
            let ratios: Vec<f64> = self.runs.iter().zip(runs).map(|(a, b)| a / b).collect();
            median(&ratios)
        } else {
            self.value / peer.value
        });
        self.peer = Some(peer);
        self.judged()
    }

    /// With something to reach: by the ratio to the peer if there is a peer, else by the value.
    #[must_use]
    pub fn target(mut self, target: Target) -> Self {
        self.target = Some(target);
        self.judged()
    }

    fn judged(mut self) -> Self {
        self.met = self
            .target
            .map(|target| target.met(self.ratio.unwrap_or(self.value)));
        self
    }
}

/// What a part of the benchmark leaves behind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measurements {
    /// What a reader has to know about them, one paragraph each.
    #[serde(default)]
    pub notes: Vec<String>,
    /// The figures, in the order in which they are to be shown.
    pub figures: Vec<Figure>,
}

impl Measurements {
    /// Name of the file of the native part, in the directory of reports.
    pub const NATIVE: &'static str = "bench-native.json";
    /// Name of the file of the part between VMs, in the directory of reports.
    pub const VM: &'static str = "bench-vm.json";
    /// Name of the file of the part between VMs over the wire, in the directory of reports.
    pub const WIRE: &'static str = "bench-wire.json";
    /// Name of the file of the part between VMs of which one has rxe, in the directory of reports.
    pub const RXE: &'static str = "bench-rxe.json";
    /// Name of the file of the part between VMs by front end, in the directory of reports.
    pub const FRONT_ENDS: &'static str = "bench-front-ends.json";
    /// All of them, in the order in which the report has them.
    pub const ALL: [&'static str; 5] = [
        Self::NATIVE,
        Self::VM,
        Self::WIRE,
        Self::RXE,
        Self::FRONT_ENDS,
    ];

    /// Older ones, with their sections replaced by those that are here.
    #[must_use]
    pub fn merged_into(self, older: Self) -> Self {
        let new = |figure: &Figure| self.figures.iter().any(|own| own.section == figure.section);
        let kept = older.figures.iter().filter(|figure| !new(figure)).cloned();
        Self {
            figures: kept.chain(self.figures.iter().cloned()).collect(),
            notes: self.notes,
        }
    }

    /// Reads a file.
    ///
    /// # Errors
    /// If there is none, or it is not of this format.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = fs::read_to_string(path).map_err(|source| io(path, source))?;
        serde_json::from_str(&text).map_err(|source| Error::Format {
            path: path.to_owned(),
            source,
        })
    }

    /// Writes a file, and the directory it is in.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        write_json(path, self)
    }
}

/// Writes anything as a JSON file, and the directory it is in.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<(), Error> {
    let text = serde_json::to_string_pretty(value).map_err(|source| Error::Format {
        path: path.to_owned(),
        source,
    })?;
    write_text(path, &(text + "\n"))
}

/// Writes a file, and the directory it is in.
pub(crate) fn write_text(path: &Path, text: &str) -> Result<(), Error> {
    let directory = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(directory)
        .and_then(|()| fs::write(path, text))
        .map_err(|source| io(path, source))
}

pub(crate) fn io(path: &Path, source: std::io::Error) -> Error {
    Error::Io {
        path: path.to_owned(),
        source,
    }
}

/// The middle one; of an even number the mean of the two in the middle. Not a number if there are
/// none.
#[must_use]
pub fn median(runs: &[f64]) -> f64 {
    let mut sorted = runs.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match (sorted.get(half.wrapping_sub(1)), sorted.get(half)) {
        (Some(low), Some(high)) if sorted.len() % 2 == 0 => (low + high) / 2.0,
        (_, Some(middle)) => *middle,
        _ => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure() -> Figure {
        Figure::new(
            Part::Vm,
            "latency",
            "WRITE",
            "µs",
            Better::Lower,
            &[3.0, 1.0, 2.0],
        )
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[5.0, 1.0, 3.0]), 3.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[7.0]), 7.0);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn a_target_is_about_the_ratio_if_there_is_a_peer() {
        let alone = figure().target(Target::Max(1.5));
        assert_eq!((alone.value, alone.met), (2.0, Some(false)));
        let beside = figure().target(Target::Max(0.5)).beside("rxe", &[5.0, 4.0]);
        assert_eq!((beside.ratio, beside.met), (Some(2.0 / 4.5), Some(true)));
        let together = figure().beside("rxe", &[6.0, 4.0, 4.0]);
        assert_eq!(together.ratio, Some(0.5));
        let changed = figure().beside("rxe", &[3.0, 10.0, 20.0]);
        assert_eq!(changed.ratio, Some(0.1));
        assert!(!Target::Min(0.65).met(0.64) && Target::Min(0.65).met(0.65));
    }

    #[test]
    fn the_format_is_the_documented_one() {
        let documented: String = include_str!("figure.rs")
            .lines()
            .skip_while(|line| !line.contains("```json"))
            .skip(1)
            .take_while(|line| !line.contains("```"))
            .map(|line| line.trim_start_matches("//!"))
            .collect();
        let read: Measurements = serde_json::from_str(&documented).unwrap();
        let expected = Figure::new(
            Part::Vm,
            "latency",
            "RDMA WRITE, 8 B",
            "µs",
            Better::Lower,
            &[24.0, 23.5, 26.1, 24.3, 23.9],
        )
        .percentile("p99", &[31.0])
        .beside("rxe", &[590.0, 600.0, 620.0, 600.0, 601.0])
        .target(Target::Max(0.0667));
        assert_eq!(read.figures, [expected]);
        let documented: serde_json::Value = serde_json::from_str(&documented).unwrap();
        assert_eq!(serde_json::to_value(&read).unwrap(), documented);
    }
}
