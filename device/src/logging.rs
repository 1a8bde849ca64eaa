// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The log of the process: where it begins, and the form of its lines.
use std::io::Write;

use clap::ValueEnum;
use env_logger::{Builder, Env};
use serde_json::json;

/// The form of a line.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// A JSON object with `time` (RFC 3339, UTC), `level`, `target` (the module) and `message`.
    Json,
}

/// Has the process log to its standard error: what is of level info or above, if RUST_LOG says
/// nothing else.
pub fn set_up(format: LogFormat) {
    let mut builder = Builder::from_env(Env::default().default_filter_or("info"));
    if format == LogFormat::Json {
        builder.format(|line, record| {
            let object = json!({
                "time": line.timestamp_millis().to_string(),
                "level": record.level().as_str(),
                "target": record.target(),
                "message": record.args().to_string(),
            });
            writeln!(line, "{object}")
        });
    }
    builder.init();
}
