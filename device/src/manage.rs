// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vhost-device-rdma list`, `add`, `remove` and `reload`: which devices a running process serves.
//!
//! The process opens no files any longer and binds nothing: the configuration is read, and sockets
//! are bound, by who asks, with what that may do. The process is passed what listens.
use std::collections::HashSet;
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use serde_json::{json, Value};

use crate::config::{self, Config, DeviceConfig, ServeArgs};
use crate::socket::{self, Access, BoundSocket};
use crate::status::{self, kept_sockets, list_devices, remove_device, set_device};
use crate::table::table;

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration makes no sense.
    #[error(transparent)]
    Config(#[from] config::Error),
    /// A socket cannot be bound.
    #[error(transparent)]
    Socket(#[from] socket::Error),
    /// The process does not answer, or refuses.
    #[error(transparent)]
    Process(#[from] status::Error),
    /// A socket that is not served any longer stays.
    #[error("cannot remove {0}")]
    Left(PathBuf, #[source] io::Error),
    /// Nothing is told of a device.
    #[error("there is no device '{0}', or no VM is attached to it")]
    NotThere(String),
    /// The output is closed.
    #[error("cannot say what was done")]
    Output(#[from] io::Error),
}

/// Writes the devices of the process behind `path` to `out` as a table, or as JSON.
///
/// # Errors
/// If nobody answers.
pub fn list(path: &Path, as_json: bool, out: &mut impl Write) -> Result<(), Error> {
    let devices = list_devices(path)?;
    if as_json {
        writeln!(out, "{}", json!({ "devices": devices }))?;
        return Ok(());
    }
    let heads = ["DEVICE", "MAC", "NETWORK", "LINK", "VM"];
    let heads = heads.map(str::to_owned).to_vec();
    let rows = devices.into_iter().map(|device| {
        let link = if device.link_up { "up" } else { "down" };
        let vm = if device.attached { "attached" } else { "-" };
        let mac = match &*device.mac {
            "00:00:00:00:00:00" => "-",
            mac => mac,
        };
        let row = [&device.name, mac, &device.network, link, vm];
        row.map(str::to_owned).to_vec()
    });
    let rows = [heads].into_iter().chain(rows).collect();
    out.write_all(table(rows).as_bytes())?;
    Ok(())
}

/// Writes the limits of the devices of the process behind `path`, or of one of them, to `out` as a
/// table, or as JSON.
///
/// # Errors
/// If nobody answers, or the process has no such device.
pub fn limits(
    path: &Path,
    device: Option<&str>,
    as_json: bool,
    out: &mut impl Write,
) -> Result<(), Error> {
    let devices = only(status::limits(path)?, device)?;
    show(devices, "limits", as_json, out)
}

/// Writes what was counted of the VMs of the process behind `path`, or of that of one device, to
/// `out` as a table, or as JSON.
///
/// # Errors
/// If nobody answers, or no VM is attached to such a device.
pub fn counters(
    path: &Path,
    device: Option<&str>,
    as_json: bool,
    out: &mut impl Write,
) -> Result<(), Error> {
    let devices = only(status::counters(path)?, device)?;
    show(devices, "counters", as_json, out)
}

/// What there is of one device, by its name or MAC address, or of all.
fn only(devices: Vec<Value>, device: Option<&str>) -> Result<Vec<Value>, Error> {
    let Some(name) = device else {
        return Ok(devices);
    };
    let is_named = |device: &Value| {
        let mac = device["mac"].as_str();
        device["name"] == name || mac.is_some_and(|mac| mac.eq_ignore_ascii_case(name))
    };
    let named: Vec<_> = devices.into_iter().filter(is_named).collect();
    match named.is_empty() {
        true => Err(Error::NotThere(name.to_owned())),
        false => Ok(named),
    }
}

/// Writes the values of each device: one in a row, or all as JSON.
fn show(
    devices: Vec<Value>,
    what: &'static str,
    as_json: bool,
    out: &mut impl Write,
) -> Result<(), Error> {
    if as_json {
        writeln!(out, "{}", json!({ "devices": devices }))?;
        return Ok(());
    }
    let heads = ["DEVICE", what, "VALUE"].map(str::to_uppercase);
    let mut rows = vec![heads.to_vec()];
    for device in &devices {
        let name = device["name"].as_str().unwrap_or_default();
        for (of, value) in device[what].as_object().into_iter().flatten() {
            match value.as_object() {
                Some(parts) => {
                    let parts = parts.iter();
                    rows.extend(
                        parts.map(|(part, value)| row(name, &format!("{of} {part}"), value)),
                    );
                }
                None => rows.push(row(name, of, value)),
            }
        }
    }
    out.write_all(table(rows).as_bytes())?;
    Ok(())
}

fn row(device: &str, what: &str, value: &Value) -> Vec<String> {
    let value = match value {
        Value::Null => "-".to_owned(),
        value => value.to_string(),
    };
    vec![device.to_owned(), what.to_owned(), value]
}

/// Has the process behind `path` serve one more device, as `text` says in the form of
/// `--socket-path`, at a socket for those whom `access` names.
///
/// # Errors
/// If the socket cannot be bound, nobody answers, or the process refuses.
pub fn add(path: &Path, text: &str, access: &Access) -> Result<(), Error> {
    let device: DeviceConfig = text.parse()?;
    serve(path, &json!({ "device": text }), &device.socket, access)?;
    Ok(())
}

/// Has the process behind `path` serve a device no longer, and removes its socket, unless the service
/// manager has bound that.
///
/// # Errors
/// If nobody answers, the process has no such device, or its socket stays.
pub fn remove(path: &Path, device: &str) -> Result<(), Error> {
    let Some(socket) = remove_device(path, device)? else {
        return Ok(());
    };
    // The process has removed those that it bound, if it could.
    let is_socket = std::fs::symlink_metadata(&socket).is_ok_and(|of| of.file_type().is_socket());
    match is_socket.then(|| std::fs::remove_file(&socket)) {
        Some(Err(error)) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::Left(socket, error))
        }
        _ => Ok(()),
    }
}

/// Has the process behind `path` serve the devices of a configuration, and no others. What it
/// serves already as it is to be is left alone. Says to `out` what was done.
///
/// # Errors
/// If the configuration makes no sense, nobody answers, or the process refuses something: what was
/// done before that stays.
pub fn reload(path: &Path, file: &Path, out: &mut impl Write) -> Result<(), Error> {
    let config = Config::new(ServeArgs {
        config: Some(file.to_owned()),
        // Devices may be none.
        status_socket: Some(path.to_owned()),
        ..ServeArgs::default()
    })?;
    let asked = config::devices_of(file)?;
    let served: HashSet<_> = list_devices(path)?.into_iter().map(|of| of.name).collect();
    let wanted: HashSet<_> = config
        .devices
        .iter()
        .map(|(device, _)| device.socket.display().to_string())
        .collect();
    let mut gone: Vec<_> = served.difference(&wanted).collect();
    gone.sort();
    for device in gone {
        remove(path, device)?;
        writeln!(out, "removed {device}")?;
    }
    for ((device, _), asked) in config.devices.iter().zip(&asked) {
        let name = device.socket.display().to_string();
        let outcome = match served.contains(&name) {
            true => set_device(path, asked, None)?,
            false => serve(path, asked, &device.socket, &config.access)?,
        };
        if outcome != "same" {
            writeln!(out, "{outcome} {name}")?;
        }
    }
    Ok(())
}

/// Has the process behind `path` serve a new device: at a socket that it keeps for it, or at one that
/// is bound here and passed to it.
fn serve(path: &Path, asked: &Value, socket: &Path, access: &Access) -> Result<String, Error> {
    if kept_sockets(path)?.iter().any(|kept| kept == socket) {
        return Ok(set_device(path, asked, None)?);
    }
    let socket = BoundSocket::bind(socket, access)?;
    let outcome = set_device(path, asked, Some(socket.as_listener()))?;
    socket.leave();
    Ok(outcome)
}
