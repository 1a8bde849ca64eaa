// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The last frames that a port has sent and received, with what became of them.
use std::collections::VecDeque;

#[cfg(test)]
use super::pcapng;
use super::pcapng::Direction;

/// A frame.
#[derive(Debug, Clone)]
struct Captured {
    time: u64,
    direction: Direction,
    frame: Vec<u8>,
    comment: Option<String>,
}

/// The last frames of a port.
#[derive(Debug)]
pub(super) struct Capture {
    /// How many are kept.
    most: usize,
    frames: VecDeque<Captured>,
}

impl Capture {
    pub(super) fn new(most: usize) -> Self {
        Self {
            most,
            frames: VecDeque::new(),
        }
    }

    /// A frame was sent or received at time `time`, nanoseconds.
    pub(super) fn add(
        &mut self,
        time: u64,
        direction: Direction,
        frame: &[u8],
        comment: Option<String>,
    ) {
        if self.frames.len() == self.most {
            self.frames.pop_front();
        }
        self.frames.push_back(Captured {
            time,
            direction,
            frame: frame.to_vec(),
            comment,
        });
    }

    /// What several ports have captured, in the order of time, as a file for Wireshark.
    #[cfg(test)]
    pub(super) fn file(captures: &[(&str, &Self)]) -> Vec<u8> {
        let mut out = Vec::new();
        pcapng::section(&mut out);
        let mut all = Vec::new();
        for (number, (name, capture)) in (0..).zip(captures) {
            pcapng::interface(&mut out, name);
            all.extend(capture.frames.iter().map(|frame| (number, frame)));
        }
        all.sort_by_key(|(_, frame)| frame.time);
        for (number, one) in all {
            let comment = one.comment.as_deref();
            let (time, direction) = (one.time, one.direction);
            pcapng::packet(&mut out, number, time, direction, &one.frame, comment);
        }
        out
    }
}
