// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vhost-device-rdma top`: what VMs, workers and queue pairs of a running process do, live. It asks
//! for the status again and again, and shows what has changed.
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::status::{self, status_of};
use crate::table::table;

/// Goes to the upper left corner of a terminal, and clears what was there.
const CLEAR: &str = "\x1b[H\x1b[J";
/// Shortest and longest time from one look to the next, seconds.
const LEAST: f64 = 0.1;
const MOST: f64 = 3600.0;

/// Why nothing is shown.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The time from one look to the next is out of range.
    #[error("every {0} s: there must be {LEAST} to {MOST} s")]
    Interval(f64),
    /// The process does not answer.
    #[error(transparent)]
    Process(#[from] status::Error),
    /// The output is closed.
    #[error("cannot show it")]
    Output(#[from] io::Error),
}

/// How often to look, and at how much.
#[derive(Debug, Clone, Copy)]
pub struct TopSettings {
    interval: Duration,
    times: Option<u64>,
    queue_pairs: usize,
}

impl TopSettings {
    /// Looks every `interval` seconds, `times` times or for ever, at so many queue pairs at most.
    ///
    /// # Errors
    /// If the interval is out of range.
    pub fn new(interval: f64, times: Option<u64>, queue_pairs: usize) -> Result<Self, Error> {
        let interval = (LEAST..=MOST)
            .contains(&interval)
            .then(|| Duration::from_secs_f64(interval))
            .ok_or(Error::Interval(interval))?;
        Ok(Self {
            interval,
            times,
            queue_pairs,
        })
    }
}

/// Shows what the process behind `path` does.
///
/// # Errors
/// If nobody answers there, or not any longer.
pub fn run(path: &Path, settings: &TopSettings, out: &mut io::Stdout) -> Result<(), Error> {
    let clear = out.is_terminal();
    let look = || status_of(path).map(|status| (Instant::now(), status));
    let mut before = look()?;
    let mut times = 0;
    while settings.times.is_none_or(|most| times < most) {
        sleep(settings.interval);
        let after = look()?;
        let seconds = after.0.duration_since(before.0).as_secs_f64();
        let change = Change {
            before: &before.1,
            after: &after.1,
            seconds,
        };
        let mut text = String::new();
        if clear {
            text.push_str(CLEAR);
        }
        text.push_str(&change.text(settings.queue_pairs));
        out.write_all(text.as_bytes())?;
        out.flush()?;
        before = after;
        times += 1;
    }
    Ok(())
}

/// What has changed from one status to the next.
struct Change<'a> {
    before: &'a Value,
    after: &'a Value,
    seconds: f64,
}

impl Change<'_> {
    fn text(&self, queue_pairs: usize) -> String {
        let mut text = String::new();
        let devices = list(self.after, "devices");
        // None of these can fail: a text has room.
        let _ = writeln!(
            text,
            "vhost-device-rdma {}: {} VMs, {} of its own\n",
            self.after["version"].as_str().unwrap_or("?"),
            devices.len(),
            bytes(self.after["resident_bytes"].as_f64().unwrap_or_default()),
        );
        text.push_str(&table(self.workers()));
        text.push('\n');
        text.push_str(&table(self.vms()));
        let busiest = self.queue_pairs(queue_pairs);
        if busiest.len() > 1 {
            text.push('\n');
            text.push_str(&table(busiest));
        }
        text.push('\n');
        text
    }

    /// How often a counter rose in a second; from 0, if it was set back or is new.
    fn rate(&self, before: Option<&Value>, after: &Value) -> f64 {
        let now = after.as_f64().unwrap_or_default();
        let then = before.and_then(Value::as_f64).unwrap_or_default();
        let rise = if now < then { now } else { now - then };
        rise / self.seconds
    }

    fn workers(&self) -> Vec<Vec<String>> {
        let heads = ["WORKER", "STATE", "POLLS/s", "DOORBELLS/s", "SLEEPS/s"];
        let mut rows = vec![heads.map(str::to_owned).to_vec()];
        for worker in list(self.after, "workers") {
            let before = same(self.before, "workers", worker, "index");
            let rate = |name: &str| count(self.rate(before.map(|old| &old[name]), &worker[name]));
            let asleep = worker["asleep"].as_bool() == Some(true);
            rows.push(vec![
                worker["index"].to_string(),
                if asleep { "asleep" } else { "awake" }.to_owned(),
                rate("polls"),
                rate("doorbells"),
                rate("sleeps"),
            ]);
        }
        rows
    }

    fn vms(&self) -> Vec<Vec<String>> {
        let heads = [
            "VM",
            "PORT",
            "QPS",
            "SENT/s",
            "B/s",
            "RECEIVED/s",
            "B/s",
            "RNR/s",
            "RETRIES/s",
            "ERRORS/s",
            "KEPT",
        ];
        let mut rows = vec![heads.map(str::to_owned).to_vec()];
        for vm in list(self.after, "devices") {
            let before = same(self.before, "devices", vm, "name");
            let rate = |name: &str| {
                let before = before.map(|old| &old["counters"][name]);
                self.rate(before, &vm["counters"][name])
            };
            let up = vm["port_up"].as_bool() == Some(true);
            rows.push(vec![
                vm["name"].as_str().unwrap_or("?").to_owned(),
                if up { "up" } else { "down" }.to_owned(),
                vm["counts"]["qps"].to_string(),
                count(rate("tx_messages")),
                bytes(rate("tx_bytes")),
                count(rate("rx_messages")),
                bytes(rate("rx_bytes")),
                count(rate("rnr_naks")),
                count(rate("retries")),
                count(rate("errors")),
                bytes(vm["footprint_bytes"].as_f64().unwrap_or_default()),
            ]);
        }
        rows
    }

    /// The busiest ones, those that do nothing left out.
    fn queue_pairs(&self, most: usize) -> Vec<Vec<String>> {
        let mut busy = Vec::new();
        for vm in list(self.after, "devices") {
            let old_vm = same(self.before, "devices", vm, "name");
            for qp in list(vm, "qps") {
                let before = old_vm.and_then(|old| same(old, "qps", qp, "qpn"));
                let rate = |name: &str| self.rate(before.map(|old| &old[name]), &qp[name]);
                let (sends, receives) = (rate("sends"), rate("receives"));
                if sends + receives > 0.0 {
                    busy.push((sends + receives, sends, receives, vm, qp));
                }
            }
        }
        busy.sort_by(|one, other| other.0.total_cmp(&one.0));
        let heads = ["QP", "TYPE", "STATE", "TO", "SENDS/s", "RECEIVES/s", "VM"];
        let mut rows = vec![heads.map(str::to_owned).to_vec()];
        for (_, sends, receives, vm, qp) in busy.into_iter().take(most) {
            rows.push(vec![
                qp["qpn"].to_string(),
                qp["type"].as_str().unwrap_or("?").to_owned(),
                qp["state"].as_str().unwrap_or("?").to_owned(),
                qp["dest_qpn"].to_string(),
                count(sends),
                count(receives),
                vm["name"].as_str().unwrap_or("?").to_owned(),
            ]);
        }
        rows
    }
}

fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value[name].as_array().map_or(&[], Vec::as_slice)
}

/// The entry of a list that is named as this one.
fn same<'a>(before: &'a Value, of: &str, entry: &Value, name: &str) -> Option<&'a Value> {
    list(before, of).iter().find(|old| old[name] == entry[name])
}

/// A number of things, in four digits or so.
fn count(number: f64) -> String {
    scaled(number, 1000.0, &["", "k", "M", "G"])
}

/// A number of bytes.
fn bytes(number: f64) -> String {
    scaled(number, 1024.0, &["", "KiB", "MiB", "GiB", "TiB"])
}

fn scaled(mut number: f64, step: f64, units: &[&str]) -> String {
    let mut units = units.iter();
    let mut unit = *units.next().unwrap_or(&"");
    for next in units {
        if number < step {
            break;
        }
        number /= step;
        unit = next;
    }
    let digits = usize::from(number < 10.0 && number.fract() != 0.0);
    format!("{number:.digits$}{unit}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_are_short() {
        for (number, text) in [
            (0.0, "0"),
            (0.25, "0.2"),
            (7.0, "7"),
            (999.0, "999"),
            (1000.0, "1k"),
            (1500.0, "1.5k"),
            (123_456_789.0, "123M"),
        ] {
            assert_eq!(count(number), text);
        }
        assert_eq!(bytes(3.5 * 1024.0 * 1024.0), "3.5MiB");
        assert_eq!(bytes(1023.0), "1023");
    }

    #[test]
    fn what_changed_is_shown() {
        let status = |messages: u64, sends: [u64; 3]| {
            let qp = |(number, sends): (usize, &u64)| {
                json!({
                    "qpn": number, "type": "RC", "state": "RTS", "dest_qpn": 9,
                    "sends": sends, "receives": 0,
                })
            };
            json!({
                "version": "1", "resident_bytes": 1 << 20,
                "workers": [{ "index": 0, "asleep": true, "polls": messages, "doorbells": 0, "sleeps": 4 }],
                "devices": [{
                    "name": "/run/vm", "port_up": true, "counts": { "qps": 3 },
                    "counters": { "tx_messages": messages, "tx_bytes": messages * 1024 },
                    "footprint_bytes": 2048,
                    "qps": sends.iter().enumerate().map(qp).collect::<Vec<_>>(),
                }],
            })
        };
        let (before, after) = (status(1000, [5, 5, 50]), status(5000, [25, 5, 3]));
        let change = Change {
            before: &before,
            after: &after,
            seconds: 2.0,
        };
        let text = change.text(1);
        let lines: Vec<Vec<_>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(
            lines[0][1..],
            ["1:", "1", "VMs,", "1MiB", "of", "its", "own"]
        );
        assert_eq!(lines[3], ["0", "asleep", "2k", "0", "0"]);
        let vm = [
            "/run/vm", "up", "3", "2k", "2.0MiB", "0", "0", "0", "0", "0", "2KiB",
        ];
        assert_eq!(lines[6], vm);
        // The one that was set back is made anew, and is less busy.
        assert_eq!(lines[9], ["0", "RC", "RTS", "9", "10", "0", "/run/vm"]);
        assert_eq!(lines.len(), 11, "{text}");
        let all = change.text(10);
        assert_eq!(all.lines().count(), 12, "{all}");
    }

    #[test]
    fn strange_answers_are_shown_as_what_they_are() {
        let (before, after) = (json!({}), json!({ "devices": 7, "workers": [null] }));
        let change = Change {
            before: &before,
            after: &after,
            seconds: 1.0,
        };
        assert!(change.text(10).contains("0 VMs"));
    }

    #[test]
    fn intervals_are_sensible() {
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY, 0.01] {
            assert!(TopSettings::new(bad, None, 1).is_err());
        }
        assert!(TopSettings::new(0.5, None, 1).is_ok());
    }
}
