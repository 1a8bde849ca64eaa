// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How errors and panics are told to people.
use std::error::Error;
use std::panic::{set_hook, PanicHookInfo};

/// `error` and its causes in one line.
#[must_use]
pub fn sentence(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(error.to_string().trim_end());
        cause = error.source();
    }
    text
}

/// Has panics logged from now on, each in one line and without a backtrace.
pub fn log_panics() {
    set_hook(Box::new(|panic: &PanicHookInfo<'_>| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("a thread");
        log::error!("{name}: {}", panic.to_string().replace('\n', " "));
    }));
}
