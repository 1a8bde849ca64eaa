// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The status socket: a client that connects gets the state of all VMs as one line of JSON, or,
//! after a line with a request, the answer to that.
//!
//! A client may send one line, `link DEVICE up` or `link DEVICE down`, or end its side of the
//! connection to say that none comes. If it does neither for a while, none is expected.
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use log::{debug, error, info};
use serde_json::{json, Value};
use vmm_sys_util::eventfd::{EventFd, EFD_NONBLOCK};

use crate::adapter::Adapter;
use crate::config::Mac;
use crate::epoll_fd::{EpollFd, NO_EVENT};
use crate::rnic::RnicSettings;
use crate::sandbox::{Kind, Sandbox};
use crate::socket::{self, BoundSocket};

/// How long a client may take to read.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client may take for its request.
const REQUEST_TIME: Duration = Duration::from_millis(500);
/// Longest request, bytes: a path and what is to be done.
const MAX_REQUEST: usize = 8192;
/// How long a client waits for an answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(30);
/// Epoll data: the process ends.
const EXIT: u64 = 0;
/// Epoll data: a client connects.
const SOCKET: u64 = 1;

/// Why the status of a running process cannot be told.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody answers there.
    #[error("cannot ask for the status at {path}")]
    Ask {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The answer is no JSON.
    #[error("{path} answered, but not with a status")]
    Answer {
        /// The socket.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
    /// The process refuses.
    #[error("{0}")]
    Refused(String),
    /// The process did not take the request for one.
    #[error("{0} told something else; the process is busy, or of an older version")]
    NoAnswer(PathBuf),
}

/// Asks the process behind `path` for its status; returns it as JSON text.
///
/// # Errors
/// If nobody answers, or with something else.
pub fn query(path: &Path, pretty: bool) -> Result<String, Error> {
    let value = ask(path, "")?;
    if pretty {
        serde_json::to_string_pretty(&value)
    } else {
        serde_json::to_string(&value)
    }
    .map_err(|source| Error::Answer {
        path: path.to_owned(),
        source,
    })
}

/// Has the process behind `path` take the link of a device down or up.
///
/// # Errors
/// If nobody answers, or the process has no such device.
pub fn set_link(path: &Path, device: &str, up: bool) -> Result<(), Error> {
    let line = |c: char| c == '\n' || c == '\r';
    if device.is_empty() || device.contains(line) || device.len() > MAX_REQUEST / 2 {
        return Err(Error::Refused(format!("'{device}' is no device")));
    }
    let state = if up { "up" } else { "down" };
    let answer = ask(path, &format!("link {device} {state}\n"))?;
    if let Some(error) = answer["error"].as_str() {
        return Err(Error::Refused(error.to_owned()));
    }
    if answer["link_up"].as_bool() != Some(up) {
        return Err(Error::NoAnswer(path.to_owned()));
    }
    Ok(())
}

/// Sends a request, or none, and returns what comes back.
fn ask(path: &Path, request: &str) -> Result<Value, Error> {
    let mut text = String::new();
    UnixStream::connect(path)
        .and_then(|mut stream| {
            stream.set_read_timeout(Some(CLIENT_TIMEOUT))?;
            stream.write_all(request.as_bytes())?;
            // There is no more: the process need not wait for it.
            stream.shutdown(Shutdown::Write)?;
            stream.read_to_string(&mut text)
        })
        .map_err(|source| Error::Ask {
            path: path.to_owned(),
            source,
        })?;
    serde_json::from_str(&text).map_err(|source| Error::Answer {
        path: path.to_owned(),
        source,
    })
}

/// A status socket that is served.
pub struct StatusServer {
    _socket: BoundSocket,
    exit: EventFd,
    thread: JoinHandle<()>,
}

impl StatusServer {
    /// Gives the status of `adapter` to everyone who may connect to `socket`, and takes the links
    /// of `devices` down and up for them. Its thread is confined by `sandbox`.
    ///
    /// # Errors
    /// If the system has no threads or file descriptors left.
    pub fn start(
        socket: BoundSocket,
        adapter: Arc<Adapter>,
        devices: Vec<RnicSettings>,
        sandbox: &Sandbox,
    ) -> Result<Self, socket::Error> {
        let failed = |source| socket.error(source);
        let server = Serving {
            listener: socket.listener()?,
            epoll: EpollFd::new().map_err(failed)?,
            adapter,
            devices,
        };
        let exit = EventFd::new(EFD_NONBLOCK).map_err(failed)?;
        server.epoll.add(&exit, EXIT).map_err(failed)?;
        let listener = &server.listener;
        server.epoll.add(listener, SOCKET).map_err(failed)?;
        let thread = sandbox
            .spawn(Kind::Control, "status".into(), move || server.run())
            .map_err(failed)?;
        Ok(Self {
            _socket: socket,
            exit,
            thread,
        })
    }

    /// Stops listening and removes the socket.
    pub fn stop(self) {
        if let Err(e) = self.exit.write(1) {
            error!("cannot stop the status thread: {e}");
            return;
        }
        if self.thread.join().is_err() {
            error!("the status thread panicked");
        }
    }
}

/// What the thread works with.
struct Serving {
    listener: UnixListener,
    epoll: EpollFd,
    adapter: Arc<Adapter>,
    devices: Vec<RnicSettings>,
}

impl Serving {
    fn run(&self) {
        loop {
            let result = self.wait().and_then(|more| {
                if more {
                    self.answer()?;
                }
                Ok(more)
            });
            match result {
                Ok(true) => {}
                Ok(false) => return,
                Err(e) => {
                    debug!("the status was not read: {e}");
                    if e.raw_os_error() == Some(libc::EMFILE) {
                        std::thread::sleep(Duration::from_millis(200));
                    }
                }
            }
        }
    }

    /// Waits for a client; false: the process ends.
    fn wait(&self) -> io::Result<bool> {
        loop {
            let mut space = [NO_EVENT; 2];
            let events = self.epoll.wait(-1, &mut space)?;
            if events.iter().any(|event| event.data == EXIT) {
                return Ok(false);
            }
            if !events.is_empty() {
                return Ok(true);
            }
        }
    }

    fn answer(&self) -> io::Result<()> {
        let (mut stream, _) = self.listener.accept()?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let request = read_request(&mut stream)?;
        // In one piece: it is formatted in very many.
        let answer = answer(&self.adapter, &self.devices, &request);
        stream.write_all(format!("{answer}\n").as_bytes())?;
        stream.shutdown(Shutdown::Both)
    }
}

/// What a client wants: its line, as much of it as it sent in time. Nothing, if it sends none.
fn read_request(stream: &mut UnixStream) -> io::Result<Vec<u8>> {
    let deadline = Instant::now() + REQUEST_TIME;
    let mut request = Vec::new();
    let mut bytes = [0; 512];
    while request.len() <= MAX_REQUEST && !request.contains(&b'\n') {
        let left = deadline.saturating_duration_since(Instant::now());
        // Zero would be no time-out.
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        match stream.read(&mut bytes) {
            Ok(0) => break,
            Ok(n) => request.extend(bytes.iter().take(n)),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                ) => {}
            Err(e) => return Err(e),
        }
        if Instant::now() >= deadline {
            break;
        }
    }
    Ok(request)
}

fn answer(adapter: &Adapter, devices: &[RnicSettings], request: &[u8]) -> Value {
    if request.is_empty() || request == b"\n" {
        return adapter.status();
    }
    match command(devices, request) {
        Ok((device, up)) => {
            adapter.set_link(&device.link, up);
            let state = if up { "up" } else { "down" };
            info!("{}: the link was taken {state}", device.name);
            json!({ "name": device.name, "link_up": up })
        }
        Err(error) => json!({ "error": error }),
    }
}

/// The device whose link is to change, and whether it is to be up.
fn command<'a>(
    devices: &'a [RnicSettings],
    request: &[u8],
) -> Result<(&'a RnicSettings, bool), String> {
    let line = request
        .strip_suffix(b"\n")
        .filter(|_| request.len() <= MAX_REQUEST)
        .and_then(|line| std::str::from_utf8(line).ok())
        .ok_or("the request is not a line")?;
    let (device, state) = line
        .strip_prefix("link ")
        .and_then(|rest| rest.rsplit_once(' '))
        .ok_or("the only request is: link DEVICE up|down")?;
    let up = match state {
        "up" => true,
        "down" => false,
        _ => return Err(format!("a link goes up or down, not '{state}'")),
    };
    Ok((find(devices, device)?, up))
}

/// The device of this name, or with this MAC address.
fn find<'a>(devices: &'a [RnicSettings], name: &str) -> Result<&'a RnicSettings, String> {
    if let Some(device) = devices.iter().find(|device| device.name == name) {
        return Ok(device);
    }
    let mac = name.parse().map(|Mac(mac)| mac).ok();
    let mut named = devices.iter().filter(|device| Some(device.mac) == mac);
    match (named.next(), named.next()) {
        (Some(device), None) => Ok(device),
        (Some(_), Some(_)) => Err(format!("several devices have {name}: name the socket")),
        (None, _) => {
            let names: Vec<_> = devices.iter().map(|device| &*device.name).collect();
            Err(format!(
                "there is no device '{name}', but: {}",
                names.join(", ")
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices() -> Vec<RnicSettings> {
        let device = |name: &str, last| RnicSettings {
            name: name.to_owned(),
            mac: [2, 0, 0, 0, 0, last],
            ..RnicSettings::default()
        };
        vec![
            device("/run/a b", 0xa),
            device("/run/c", 0xc),
            device("/run/d", 0xc),
        ]
    }

    #[test]
    fn a_device_is_named_by_its_socket_or_mac_address() {
        let devices = devices();
        let of = |request: &str| {
            command(&devices, request.as_bytes()).map(|(device, up)| (device.name.as_str(), up))
        };
        assert_eq!(of("link /run/a b down\n"), Ok(("/run/a b", false)));
        assert_eq!(of("link /run/d up\n"), Ok(("/run/d", true)));
        assert_eq!(of("link 02:00:00:00:00:0A up\n"), Ok(("/run/a b", true)));
        assert!(of("link 02:00:00:00:00:0c up\n").is_err(), "there are two");
        assert!(of("link 02:00:00:00:00:0e up\n").is_err());
    }

    #[test]
    fn nonsense_is_refused() {
        let devices = devices();
        for request in [
            &b"link /run/c"[..],
            b"link /run/c up",
            b"link /run/c up\n\n",
            b"link /run/c UP\n",
            b"link /run/c \n",
            b"link  up\n",
            b"link up\n",
            b"link\n",
            b"unlink /run/c up\n",
            b"\xff\n",
            b" \n",
            &[b'\n'; 2],
            &[b'x'; 2 * MAX_REQUEST],
        ] {
            assert!(command(&devices, request).is_err(), "{request:?}");
        }
    }
}
