// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What Wireshark's dissectors make of a file of `vhost-device-rdma capture`: each frame is RoCEv2
//! to them, nothing is malformed, and the comments of what became of the frames are there.
//!
//! Wireshark shows ICRCs, and does not check them. Soft-RoCE does (lane `rxe-interop`).

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::Path;

use anyhow::{ensure, Context, Result};

use super::decode::tshark;
use super::stock::{self, LONG, USUAL};
use super::Fixture;

/// What a capture shows: its name, and the opcodes of the packets.
pub type Operation = (&'static str, RangeInclusive<u8>);

/// All that [`send_all`] sends where nothing is lost.
pub const ALL: [Operation; 9] = [
    ("SEND", 0..=5),
    ("WRITE", 6..=11),
    ("READ request", 12..=12),
    ("READ response", 13..=16),
    ("acknowledgement", 17..=17),
    ("atomic acknowledgement", 18..=18),
    ("atomic operation", 19..=20),
    ("UC", 32..=43),
    ("UD", 100..=101),
];

/// Frames in which something is wrong: they are malformed, or worse than a warning is said of them.
const WRONG: &str = "_ws.malformed || _ws.expert.severity >= 0x800000";

/// Frames that are no RoCEv2: a device sends and takes nothing else.
const STRANGE: &str = "!(udp.dstport == 4791 && infiniband.bth.opcode)";

/// Frames that came, and of which nobody says what the device made of them.
const UNEXPLAINED: &str = "frame.packet_flags_direction == 1 && !frame.comment";

/// What a capture has.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Seen {
    frames: u64,
    /// Packets of each opcode.
    opcodes: BTreeMap<u8, u64>,
    /// Frames of each comment, without the numbers in it.
    comments: BTreeMap<String, u64>,
}

impl Seen {
    /// Reads what tshark says: a line for each frame, its opcode and its comment.
    fn parse(text: &str) -> Result<Self> {
        let mut seen = Seen::default();
        for line in text.lines() {
            let (opcode, comment) = line.split_once('\t').unwrap_or((line, ""));
            let opcode = opcode
                .parse()
                .with_context(|| format!("no opcode in {line:?}"))?;
            seen.frames += 1;
            *seen.opcodes.entry(opcode).or_default() += 1;
            let comment: String = comment.chars().filter(|c| !c.is_ascii_digit()).collect();
            *seen.comments.entry(comment).or_default() += 1;
        }
        Ok(seen)
    }

    /// Adds another one.
    pub fn add(&mut self, other: Seen) {
        self.frames += other.frames;
        for (opcode, frames) in other.opcodes {
            *self.opcodes.entry(opcode).or_default() += frames;
        }
        for (comment, frames) in other.comments {
            *self.comments.entry(comment).or_default() += frames;
        }
    }

    /// An error unless there are packets of these operations, and comments that begin so.
    pub fn expect(&self, operations: &[Operation], comments: &[&str]) -> Result<()> {
        for (name, opcodes) in operations {
            let there = self.opcodes.keys().any(|opcode| opcodes.contains(opcode));
            ensure!(there, "no packet of {name}: {self:?}");
        }
        for wanted in comments {
            let there = self.comments.keys().any(|said| said.starts_with(wanted));
            ensure!(there, "no frame has the comment {wanted:?}: {self:?}");
        }
        Ok(())
    }

    /// Frames without a comment.
    pub fn without_comment(&self) -> u64 {
        self.comments.get("").copied().unwrap_or_default()
    }

    /// For people.
    pub fn summary(&self) -> String {
        let commented = self.frames - self.without_comment();
        format!("{} frames, {commented} with comments", self.frames)
    }
}

/// Checks a capture, and says what is in it.
pub fn check(file: &Path) -> Result<Seen> {
    for (filter, what) in [
        (WRONG, "wrong"),
        (STRANGE, "not RoCEv2"),
        (UNEXPLAINED, "without a comment"),
    ] {
        let frames = decode(file, &["-Y", filter])?;
        ensure!(
            frames.is_empty(),
            "{} frames of {} are {what} for Wireshark:\n{}",
            frames.lines().count(),
            file.display(),
            frames.lines().take(10).collect::<Vec<_>>().join("\n")
        );
    }
    let fields = "-T fields -E occurrence=f -e infiniband.bth.opcode -e frame.comment";
    let words: Vec<&str> = fields.split(' ').collect();
    Seen::parse(&decode(file, &words)?)
}

/// What Wireshark guesses to be in payloads, which are test patterns here.
const GUESSES: [&str; 8] = [
    "fcoib",
    "infiniband_sdp",
    "iser",
    "lnet",
    "nvme-rdma",
    "rpcordma",
    "smb_direct",
    "smc",
];

/// Runs tshark without such guesses. That of an Ethernet type (0x8100, and zeros) has no protocol.
fn decode(file: &Path, words: &[&str]) -> Result<String> {
    let guess = ["--disable-heuristic", "eth_over_ib"];
    tshark(file, &[&guess, words].concat(), &GUESSES)
}

/// Messages of one packet and of many. If packets are lost, those of RC alone.
pub fn send_all(fixture: &mut Fixture, lossy: bool) -> Result<()> {
    stock::rping(fixture, USUAL)?;
    let pingpongs: &[_] = &[("ibv_rc_pingpong", "-c -s 65536 -n 20")];
    let unreliable: &[_] = &[
        ("ibv_uc_pingpong", "-c -s 8191 -n 20"),
        ("ibv_ud_pingpong", "-c -s 1024 -n 20"),
    ];
    for (tool, options) in pingpongs.iter().chain(if lossy { &[] } else { unreliable }) {
        stock::pingpong(fixture, USUAL, tool, &[options])?;
    }
    let tools = [
        ("ib_send_bw", "-s 1"),
        ("ib_send_bw", "-s 8191"),
        ("ib_write_bw", "-s 65535"),
        ("ib_read_bw", "-s 65535"),
        ("ib_atomic_bw", "-A FETCH_AND_ADD"),
        ("ib_atomic_bw", "-A CMP_AND_SWAP"),
    ];
    for (tool, options) in tools {
        let pair = fixture.pair(USUAL.0, USUAL.1);
        let arguments = format!("-n 50 {options}");
        pair.perftest(&fixture.bed, tool, &arguments, LONG)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opcodes_and_comments_are_counted() {
        let text = "4\tfaults: lost (frame 12)\n4\tfaults: lost (frame 13)\n17\ttaken\n100\t\n";
        let mut seen = Seen::parse(text).expect("opcodes");
        assert_eq!(seen.summary(), "4 frames, 3 with comments");
        assert_eq!(seen.comments["faults: lost (frame )"], 2);
        let [send, _, read, _, acknowledge, .., ud] = ALL;
        seen.expect(&[send, acknowledge, ud], &["taken", "faults: lost"])
            .expect("all of it");
        let read = [read];
        assert!(seen.expect(&read, &[]).is_err());
        assert!(seen.expect(&[], &["again"]).is_err());
        seen.add(Seen::parse("12\tagain: sent\n").expect("an opcode"));
        seen.expect(&read, &["taken", "again"]).expect("both");
        assert!(Seen::parse("\ttaken\n").is_err());
    }
}
