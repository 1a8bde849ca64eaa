// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lines of the log that a guest or a front end causes: a few each second at most, for each device,
//! however often front ends come and go.
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
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

/// The lines of one device: of its front ends, and of the VMs that it has one after the other.
#[derive(Debug, Default)]
pub struct RateLimited {
    state: Mutex<State>,
}

impl RateLimited {
    /// For lines that begin with a name.
    #[must_use]
    pub fn of(self: &Arc<Self>, name: &str) -> Named {
        Named {
            name: name.to_owned(),
            lines: self.clone(),
        }
    }
}

/// The same, with the name that begins each line.
#[derive(Debug)]
pub struct Named {
    name: String,
    lines: Arc<RateLimited>,
}

impl Named {
    /// Writes a line, unless there were too many this second.
    pub fn log(&self, level: Level, what: fmt::Arguments<'_>) {
        let second = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |elapsed| elapsed.as_secs());
        let mut state = self
            .lines
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if state.second != second {
            if state.suppressed != 0 {
                log::warn!(
                    device = self.name;
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
            log::log!(level, device = self.name; "{}: {what}", self.name);
        } else {
            state.count = MOST;
            state.suppressed += 1;
        }
    }
}

impl Warn for Named {
    fn name(&self) -> &str {
        &self.name
    }

    fn warn(&self, what: fmt::Arguments<'_>) {
        self.log(Level::Warn, what);
    }
}
