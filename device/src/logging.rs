// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The log of the process: where it begins, and the form of its lines.
use std::io::Write;

use clap::ValueEnum;
use env_logger::{Builder, Env};
use log::kv::Key;
use serde::Deserialize;
use serde_json::json;

/// What a line is about: a device, by its name.
const DEVICE: &str = "device";

/// The form of a line.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// A JSON object with `time` (RFC 3339, UTC), `level`, `target` (the module) and `message`, and
    /// `device`, its name, if the line is about one or its VM.
    Json,
}

/// Has the process log to its standard error: what is of level info or above, if RUST_LOG says
/// nothing else.
pub fn set_up(format: LogFormat) {
    let mut builder = Builder::from_env(Env::default().default_filter_or("info"));
    if format == LogFormat::Json {
        builder.format(|line, record| {
            let mut object = json!({
                "time": line.timestamp_millis().to_string(),
                "level": record.level().as_str(),
                "target": record.target(),
                "message": record.args().to_string(),
            });
            let device = record.key_values().get(Key::from(DEVICE));
            if let (Some(device), Some(object)) = (device, object.as_object_mut()) {
                object.insert(DEVICE.to_owned(), device.to_string().into());
            }
            writeln!(line, "{object}")
        });
    }
    builder.init();
}
