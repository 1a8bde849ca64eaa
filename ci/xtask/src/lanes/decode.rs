// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What Wireshark's dissectors of iWARP say of a capture: all of it is iWARP, nothing is malformed, and
//! each CRC was checked and is right.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{ensure, Result};

use crate::shell;

/// Operations that the traffic has, as Wireshark names them.
const OPERATIONS: [&str; 4] = ["Send", "Write", "Read Request", "Read Response"];

/// Frames in which something is wrong. That MPA has revision 2 of RFC 6581, and a flag of it, is a
/// mere warning.
const WRONG: &str = "_ws.malformed || _ws.expert.severity >= 0x800000";

/// Frames with data that is not of iWARP: a segment whose rest is in another frame is found there.
const STRANGE: &str =
    "tcp.len > 0 && !iwarp_mpa && !tcp.reassembled_in && !tcp.analysis.retransmission";

/// What Wireshark says of a capture.
#[derive(Debug, Default, PartialEq, Eq)]
struct Decoded {
    /// CRCs that are right.
    good: u32,
    /// CRCs that are not.
    bad: u32,
    /// CRCs that nobody checked, since the ends agreed to have none.
    unchecked: u32,
    /// Segments of each operation.
    operations: BTreeMap<String, u32>,
}

impl Decoded {
    /// Reads the details of the protocols.
    fn parse(text: &str) -> Self {
        let mut decoded = Decoded::default();
        for line in text.lines().map(str::trim_start) {
            if line.starts_with("CRC check: ") {
                match line.ends_with("(Good CRC32)") {
                    true => decoded.good += 1,
                    false => decoded.bad += 1,
                }
            } else if line.starts_with("CRC: 0x") {
                decoded.unchecked += 1;
            } else if let Some((_, operation)) = line.split_once(" = OpCode: ") {
                let name = operation.split(" (0x").next().unwrap_or(operation);
                *decoded.operations.entry(name.to_owned()).or_default() += 1;
            }
        }
        decoded
    }
}

/// Checks a capture, and says what there was.
pub fn check(file: &Path) -> Result<String> {
    for (filter, what) in [(WRONG, "wrong"), (STRANGE, "not iWARP")] {
        let frames = tshark(file, &["-Y", filter], &GUESSES)?;
        ensure!(
            frames.is_empty(),
            "{} frames are {what} for Wireshark:\n{}",
            frames.lines().count(),
            frames.lines().take(10).collect::<Vec<_>>().join("\n")
        );
    }
    let decoded = Decoded::parse(&tshark(
        file,
        &["-O", "iwarp_mpa,iwarp_ddp_rdmap"],
        &GUESSES,
    )?);
    ensure!(
        decoded.good > 0 && decoded.bad == 0 && decoded.unchecked == 0,
        "not all CRCs are right: {decoded:?}"
    );
    for operation in OPERATIONS {
        ensure!(
            decoded.operations.contains_key(operation),
            "no {operation}: {decoded:?}"
        );
    }
    let unasked = |name: &&String| !OPERATIONS.contains(&name.as_str());
    let others: Vec<_> = decoded.operations.keys().filter(unasked).collect();
    ensure!(others.is_empty(), "nobody asked for {others:?}");
    Ok(format!("{} CRCs are right", decoded.good))
}

/// Wireshark guesses what messages are for: those for RPC are none here.
const GUESSES: [&str; 2] = ["rpcordma", "smb_direct"];

/// Runs tshark on a capture, in two passes: in the first it sees where the rest of segments is. It
/// does not know some protocols then.
pub fn tshark(file: &Path, words: &[&str], unknown: &[&str]) -> Result<String> {
    let mut command = Command::new("tshark");
    command.arg("-2").arg("-r").arg(file).args(words);
    for protocol in unknown {
        command.args(["--disable-protocol", protocol]);
    }
    shell::capture(&mut command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crcs_and_operations_are_counted() {
        let text = "iWARP Marker Protocol data unit Aligned framing\n    FPDU\n        \
            ULPDU length: 34 bytes\n        CRC check: 0x5f11647a (Good CRC32)\n        \
            .... 0011 = OpCode: Send (0x3)\n        .... 0001 = OpCode: Read Request (0x1)\n        \
            CRC check: 0xe239bd70 (Bad CRC32, should be 0x9d2dfa3d)\n        CRC: 0x00000000\n        \
            .1.. .... = CRC flag: True\n        .... 0011 = OpCode: Send (0x3)\n";
        let operations = [("Send".to_owned(), 2), ("Read Request".to_owned(), 1)];
        let wanted = Decoded {
            good: 1,
            bad: 1,
            unchecked: 1,
            operations: operations.into(),
        };
        assert_eq!(Decoded::parse(text), wanted);
    }
}
