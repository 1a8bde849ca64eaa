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
use crate::status::{self, list_devices, remove_device, set_device};
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

/// Has the process behind `path` serve a device no longer, and removes its socket.
///
/// # Errors
/// If nobody answers, the process has no such device, or its socket stays.
pub fn remove(path: &Path, device: &str) -> Result<(), Error> {
    let socket = remove_device(path, device)?;
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

/// Binds a socket and passes it to the process behind `path`.
fn serve(path: &Path, asked: &Value, socket: &Path, access: &Access) -> Result<String, Error> {
    let socket = BoundSocket::bind(socket, access)?;
    let outcome = set_device(path, asked, Some(socket.as_listener()))?;
    socket.leave();
    Ok(outcome)
}
