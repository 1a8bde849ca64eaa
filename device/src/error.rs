// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How errors are told to people.
use std::error::Error;

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
