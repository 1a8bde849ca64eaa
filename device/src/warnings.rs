// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lines of the log that a guest or a front end causes: a few each second at most, for each VM.
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use log::Level;

use crate::engine::vm::Warn;

/// Lines per second.
const MOST: u32 = 10;

#[derive(Debug, Default)]
struct State {
    second: u64,
    count: u32,
    suppressed: u64,
}

/// The lines of one VM.
#[derive(Debug)]
pub struct RateLimited {
    /// Begins each line.
    name: String,
    state: Mutex<State>,
}

impl RateLimited {
    /// For the VM of this name.
    #[must_use]
    pub fn new(name: String) -> Self {
        Self {
            name,
            state: Mutex::default(),
        }
    }

    /// Writes a line, unless there were too many this second.
    pub fn log(&self, level: Level, what: fmt::Arguments<'_>) {
        let second = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |elapsed| elapsed.as_secs());
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.second != second {
            if state.suppressed != 0 {
                log::warn!(
                    "{}: {} more messages suppressed",
                    self.name,
                    state.suppressed
                );
            }
            *state = State {
                second,
                ..State::default()
            };
        }
        state.count += 1;
        if state.count <= MOST {
            log::log!(level, "{}: {what}", self.name);
        } else {
            state.count = MOST;
            state.suppressed += 1;
        }
    }
}

impl Warn for RateLimited {
    fn warn(&self, what: fmt::Arguments<'_>) {
        self.log(Level::Warn, what);
    }
}
