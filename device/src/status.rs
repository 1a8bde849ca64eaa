// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The status socket: a client that connects gets the state of all VMs as one line of JSON, or,
//! after a line with a request, the answer to that.
//!
//! A client may send one line with a request, or end its side of the connection to say that none
//! comes. If it does neither for a while, none is expected. The requests and their answers are in
//! `docs/control.md`. To `capture` the answer is a file for Wireshark that grows until the client
//! goes; one client at a time captures.
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use log::{error, info};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use nix::unistd::Uid;
use serde::{Deserialize, Serialize};
use serde_json::{json, Value};
use vmm_sys_util::eventfd::{EventFd, EFD_NONBLOCK};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::adapter::{Adapter, Failing};
use crate::config::{Asked, FaultDirection, FaultsOrOff, FrontEnd, LimitsArgs, Mac, Object};
use crate::devices::{self, Devices, Outcome};
use crate::error::sentence;
use crate::fabric::wire::capture::{Capture, CaptureFile, Captured};
use crate::fabric::wire::layer::settings::FaultSettings;
use crate::fabric::wire::port::Direction;
use crate::limits::Limits;
use crate::rnic::{Rnic, RnicSettings};
use crate::sandbox::{Kind, Sandbox};
use crate::socket::{
    self, pass_over, read_request, send_all, Answering, Arrival, BoundSocket, Door, Passing,
};
use crate::verbs::gid_policy::mac_text;

/// How long a client may take to read the answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client may take for its request.
const REQUEST_TIME: Duration = Duration::from_millis(500);
/// Longest request, bytes: a path, or two, and what is to be done.
const MAX_REQUEST: usize = 65_536;
/// How long a client waits for an answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(30);
/// The MAC address of a device for which the configuration has none.
const NO_MAC: [u8; 6] = [0; 6];
/// How long a frame is kept before a client that captures gets it.
const CAPTURE_TIME: i32 = 50;
/// Bytes that a client that captures has not read yet, at most: what comes then is left out.
const MOST_UNREAD: usize = 64 << 20;

/// A device, with a VM or without.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// Its name: its socket.
    pub name: String,
    /// The MAC address that it is configured with; all zero: none.
    pub mac: String,
    /// Its network.
    pub network: String,
    /// Its link is up.
    pub link_up: bool,
    /// A VM is attached.
    pub attached: bool,
    /// What its VMM speaks. Older processes do not say.
    #[serde(default)]
    pub front_end: FrontEnd,
}

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
    let value = status_of(path)?;
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

/// Asks the process behind `path` for its status.
///
/// # Errors
/// If nobody answers, or with something else.
pub fn status_of(path: &Path) -> Result<Value, Error> {
    ask(path, "")
}

/// Has the process behind `path` take the link of a device down or up.
///
/// # Errors
/// If nobody answers, or the process has no such device.
pub fn set_link(path: &Path, device: &str, up: bool) -> Result<(), Error> {
    check_device(device)?;
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

/// Puts an object of a VM of the process behind `path` in error.
///
/// # Errors
/// If nobody answers, or there is no such object in use.
pub fn fail(path: &Path, device: &str, what: Object, number: u32) -> Result<(), Error> {
    check_device(device)?;
    let kind = match what {
        Object::Qp => "qp",
        Object::Cq => "cq",
    };
    let answer = ask(path, &format!("fail {device} {kind} {number}\n"))?;
    if let Some(error) = answer["error"].as_str() {
        return Err(Error::Refused(error.to_owned()));
    }
    if answer["failed"].as_u64() != Some(number.into()) {
        return Err(Error::NoAnswer(path.to_owned()));
    }
    Ok(())
}

/// Has the process behind `path` serve a device as `asked` says, in the form of
/// [`Asked`]: a new one at `socket`, or one that it has. Returns what became
/// of it, in a word.
///
/// # Errors
/// If nobody answers, or the process cannot serve it.
pub fn set_device(
    path: &Path,
    asked: &Value,
    socket: Option<&UnixListener>,
) -> Result<String, Error> {
    let answer = ask_passing(path, &format!("set {asked}\n"), socket)?;
    outcome(path, &answer)
}

/// Has the process behind `path` serve a device no longer. Returns its socket, if that is to be
/// removed.
///
/// # Errors
/// If nobody answers, or the process has no such device.
pub fn remove_device(path: &Path, device: &str) -> Result<Option<PathBuf>, Error> {
    check_device(device)?;
    let answer = ask(path, &format!("remove {device}\n"))?;
    outcome(path, &answer)?;
    if answer["kept"] == true {
        return Ok(None);
    }
    let name = answer["name"].as_str();
    Ok(Some(name.unwrap_or_default().into()))
}

fn outcome(path: &Path, answer: &Value) -> Result<String, Error> {
    if let Some(error) = answer["error"].as_str() {
        return Err(Error::Refused(error.to_owned()));
    }
    let outcome = answer["outcome"].as_str();
    let outcome = outcome.ok_or_else(|| Error::NoAnswer(path.to_owned()))?;
    Ok(outcome.to_owned())
}

/// The devices of the process behind `path`.
///
/// # Errors
/// If nobody answers, or with something else.
pub fn list_devices(path: &Path) -> Result<Vec<Listed>, Error> {
    let mut answer = ask(path, "list\n")?;
    let devices = serde_json::from_value(answer["devices"].take());
    devices.map_err(|_| Error::NoAnswer(path.to_owned()))
}

/// The sockets that the process behind `path` keeps for devices that may come back: the service
/// manager has bound them.
///
/// # Errors
/// If nobody answers, or with something else.
pub fn kept_sockets(path: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut answer = ask(path, "list\n")?;
    // Older processes keep none.
    let kept: Option<_> = serde_json::from_value(answer["kept"].take())
        .map_err(|_| Error::NoAnswer(path.to_owned()))?;
    Ok(kept.unwrap_or_default())
}

/// What the process behind `path` says of its devices when it is asked for `what`: an object for
/// each, with its `name` and `mac`.
fn each_device(path: &Path, what: &str) -> Result<Vec<Value>, Error> {
    let mut answer = ask(path, &format!("{what}\n"))?;
    match answer["devices"].take() {
        Value::Array(devices) => Ok(devices),
        _ => Err(Error::NoAnswer(path.to_owned())),
    }
}

/// The limits of the devices of the process behind `path`, each with a `name`, a `mac` and `limits`.
///
/// # Errors
/// If nobody answers, or with something else.
pub fn limits(path: &Path) -> Result<Vec<Value>, Error> {
    each_device(path, "limits")
}

/// The counters of the VMs of the process behind `path`, each with a `name`, a `mac` and `counters`.
///
/// # Errors
/// If nobody answers, or with something else.
pub fn counters(path: &Path) -> Result<Vec<Value>, Error> {
    each_device(path, "counters")
}

/// Changes limits of a device of the process behind `path`. Returns what became of it, in a word.
///
/// # Errors
/// If nobody answers, the process has no such device, or they make no sense.
pub fn set_limits(path: &Path, device: &str, limits: &LimitsArgs) -> Result<String, Error> {
    check_device(device)?;
    let change = json!({ "device": device, "limits": limits });
    let answer = ask(path, &format!("limits {change}\n"))?;
    outcome(path, &answer)
}

/// Limits that are to change.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitsChange {
    device: String,
    limits: LimitsArgs,
}

/// A device's name fits into a request.
fn check_device(device: &str) -> Result<(), Error> {
    let line = |c: char| c == '\n' || c == '\r';
    if device.is_empty() || device.contains(line) || device.len() > MAX_REQUEST / 2 {
        return Err(Error::Refused(format!("'{device}' is no device")));
    }
    Ok(())
}

/// Gives the frames of a device of the process behind `path` faults in one direction or both, or none
/// any longer.
///
/// # Errors
/// If nobody answers, or the process has no such device, or the device no frames.
pub fn set_faults(
    path: &Path,
    device: &str,
    direction: Option<FaultDirection>,
    faults: Option<&FaultSettings>,
) -> Result<(), Error> {
    check_device(device)?;
    let direction = match direction {
        Some(FaultDirection::In) => "in",
        Some(FaultDirection::Out) => "out",
        None => "both",
    };
    let faults = faults.map_or_else(|| "off".to_owned(), |faults| faults.to_string());
    let answer = ask(path, &format!("faults {device} {direction} {faults}\n"))?;
    if let Some(error) = answer["error"].as_str() {
        return Err(Error::Refused(error.to_owned()));
    }
    if answer["faults"].as_str() != Some(&faults) {
        return Err(Error::NoAnswer(path.to_owned()));
    }
    Ok(())
}

/// Has the frames of a device of the process behind `path` wait from number `from` on, or no longer. Returns
/// how many there were, and the first one that waits: if it is before `from`, it goes on in a moment.
///
/// # Errors
/// If nobody answers, or the process has no such device, or the device no frames.
pub fn hold_frames(
    path: &Path,
    device: &str,
    direction: FaultDirection,
    from: Option<u64>,
) -> Result<(u64, Option<u64>), Error> {
    check_device(device)?;
    let direction = match direction {
        FaultDirection::In => "in",
        FaultDirection::Out => "out",
    };
    let from = from.map_or_else(|| "off".to_owned(), |from| from.to_string());
    let answer = ask(path, &format!("hold {device} {direction} {from}\n"))?;
    if let Some(error) = answer["error"].as_str() {
        return Err(Error::Refused(error.to_owned()));
    }
    let frames = answer["frames"].as_u64();
    let frames = frames.ok_or_else(|| Error::NoAnswer(path.to_owned()))?;
    Ok((frames, answer["waits"].as_u64()))
}

/// Writes what a process sends and receives over the wire to `out`, in the format of Wireshark, until
/// `out` takes no more or the process ends: at most `snap` bytes of each frame, of all VMs or of the
/// one of a device.
///
/// # Errors
/// If nobody answers, or the process has no such device.
pub fn capture(
    path: &Path,
    device: Option<&str>,
    snap: usize,
    out: &mut impl Write,
) -> Result<(), Error> {
    let failed = |source| Error::Ask {
        path: path.to_owned(),
        source,
    };
    let mut stream = UnixStream::connect(path).map_err(failed)?;
    let device = device.unwrap_or_default();
    if device.contains(['\n', '\r']) || device.len() > MAX_REQUEST / 2 {
        return Err(Error::Refused(format!("'{device}' is no device")));
    }
    let request = format!("capture snap={snap} {device}\n");
    stream.write_all(request.as_bytes()).map_err(failed)?;
    let mut bytes = vec![0; 1 << 16];
    let mut first = true;
    loop {
        let count = stream.read(&mut bytes).map_err(failed)?;
        let read = bytes.get(..count).unwrap_or_default();
        if read.is_empty() {
            return Ok(());
        }
        if std::mem::take(&mut first) && read.starts_with(b"{") {
            let answer: Value = serde_json::from_slice(read).unwrap_or_default();
            let error = answer["error"].as_str().map(str::to_owned);
            return Err(error.map_or(Error::NoAnswer(path.to_owned()), Error::Refused));
        }
        // The reader of the output has seen enough.
        if out.write_all(read).and_then(|()| out.flush()).is_err() {
            return Ok(());
        }
    }
}

/// Sends a request, or none, and returns what comes back.
fn ask(path: &Path, request: &str) -> Result<Value, Error> {
    ask_passing(path, request, None)
}

/// The same, with a socket that the process is to have.
fn ask_passing(path: &Path, request: &str, passed: Option<&UnixListener>) -> Result<Value, Error> {
    let mut text = String::new();
    UnixStream::connect(path)
        .and_then(|mut stream| {
            stream.set_read_timeout(Some(CLIENT_TIMEOUT))?;
            let sent = match passed {
                Some(socket) => stream.send_with_fd(request.as_bytes(), socket.as_raw_fd())?,
                None => 0,
            };
            stream.write_all(request.as_bytes().get(sent..).unwrap_or_default())?;
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
    answering: Arc<Answering>,
    thread: JoinHandle<()>,
}

impl StatusServer {
    /// Gives the status of `devices` and their adapter to everyone who may connect to `socket`, and
    /// takes links down and up for them. Root and `operator` may capture, too, since frames have the
    /// VMs' data in them, and add, change and remove devices. Its thread is confined by `sandbox`.
    ///
    /// # Errors
    /// If the system has no threads or file descriptors left.
    pub fn start(
        socket: BoundSocket,
        devices: Arc<Devices>,
        operator: Uid,
        sandbox: &Sandbox,
    ) -> Result<Self, socket::Error> {
        let failed = |source| socket.error(source);
        let listener = socket.listener()?;
        let exit = EventFd::new(EFD_NONBLOCK).map_err(failed)?;
        let answering = Arc::new(Answering::default());
        let mut server = Serving {
            answering: answering.clone(),
            door: Door::new(&listener, &exit).map_err(failed)?,
            listener,
            devices,
            operator,
            capturing: None,
        };
        let thread = sandbox
            .spawn(Kind::Control, "status".into(), move || server.run())
            .map_err(failed)?;
        Ok(Self {
            _socket: socket,
            exit,
            answering,
            thread,
        })
    }

    /// Stops listening and removes the socket.
    pub fn stop(self) {
        if let Err(e) = self.exit.write(1) {
            error!("cannot stop the status thread: {e}");
            return;
        }
        self.answering.end();
        if self.thread.join().is_err() {
            error!("the status thread panicked");
        }
    }
}

/// What the thread works with.
struct Serving {
    answering: Arc<Answering>,
    listener: UnixListener,
    door: Door,
    devices: Arc<Devices>,
    /// Who may capture, and say what devices there are, beside root.
    operator: Uid,
    capturing: Option<Capturing>,
}

/// A client that captures.
struct Capturing {
    stream: UnixStream,
    capture: Arc<Capture>,
    file: CaptureFile,
    /// Only frames from and to this address.
    mac: Option<[u8; 6]>,
    /// What it has not read yet.
    unread: Vec<u8>,
    /// Frames that were left out.
    missed: u64,
}

impl Capturing {
    /// Hands on what was captured. False if the client has gone.
    fn feed(&mut self) -> bool {
        let (frames, missed) = self.capture.take();
        self.missed += missed;
        let wanted = |frame: &&Captured| self.mac.is_none_or(|mac| frame.concerns(&mac));
        for frame in frames.iter().filter(wanted) {
            if self.unread.len() > MOST_UNREAD {
                self.missed += 1;
            } else {
                self.file.add(&mut self.unread, "", frame);
            }
        }
        let mut read = 0;
        while let Some(rest) = self.unread.get(read..).filter(|rest| !rest.is_empty()) {
            match self.stream.write(rest) {
                Ok(written) => read += written,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return false,
            }
        }
        self.unread.drain(..read);
        let end = self.stream.read(&mut [0; 64]);
        end.is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock)
    }
}

impl Drop for Capturing {
    fn drop(&mut self) {
        self.capture.set(false);
        info!("the capture ended; {} frames were left out", self.missed);
    }
}

impl Serving {
    fn run(&mut self) {
        loop {
            self.feed_capture();
            let timeout = self.capturing.as_ref().map_or(-1, |_| CAPTURE_TIME);
            let result = self.door.wait(timeout).and_then(|arrival| {
                if arrival == Arrival::Client {
                    self.answer()?;
                }
                Ok(arrival)
            });
            match result {
                Ok(Arrival::Exit) => return,
                Ok(_) => {}
                Err(error) => pass_over(&error),
            }
        }
    }

    /// Hands on what was captured, and ends the capture of a client that has gone.
    fn feed_capture(&mut self) {
        if self.capturing.as_mut().is_some_and(|client| !client.feed()) {
            self.capturing = None;
        }
    }

    fn answer(&mut self) -> io::Result<()> {
        let (stream, _) = self.listener.accept()?;
        let (answering, client) = (self.answering.clone(), stream.try_clone()?);
        answering.answer(client.into(), || self.answer_to(stream))
    }

    fn answer_to(&mut self, mut stream: UnixStream) -> io::Result<()> {
        let whole = |request: &[u8]| request.contains(&b'\n');
        let mut client = Passing::new(&stream);
        let request = read_request(&mut client, REQUEST_TIME, MAX_REQUEST, whole)?;
        let passed = client.listener();
        let answer = match request.strip_prefix(b"capture ") {
            Some(what) => match self.begin_capture(&stream, what) {
                Ok((capture, mac, snap)) => {
                    stream.set_nonblocking(true)?;
                    let mut unread = Vec::new();
                    let file = CaptureFile::begin(&mut unread, snap);
                    capture.set(true);
                    self.capturing = Some(Capturing {
                        stream,
                        capture,
                        file,
                        mac,
                        unread,
                        missed: 0,
                    });
                    return Ok(());
                }
                Err(error) => json!({ "error": error }),
            },
            None => match self.of_devices(&stream, &request, passed) {
                Some(result) => result.unwrap_or_else(|error| json!({ "error": error })),
                None => answer(self.devices.adapter(), &self.devices.settings(), &request),
            },
        };
        // In one piece: it is formatted in very many.
        send_all(&mut stream, format!("{answer}\n").as_bytes(), TIMEOUT)?;
        stream.shutdown(Shutdown::Both)
    }
}

/// What is captured: where it comes from, of which address, and how much of each frame.
type WhatToCapture = (Arc<Capture>, Option<[u8; 6]>, usize);

impl Serving {
    /// What a client that wants to capture is to get.
    fn begin_capture(&mut self, client: &UnixStream, what: &[u8]) -> Result<WhatToCapture, String> {
        self.check_operator(client)?;
        let (mac, snap) = to_capture(&self.devices.settings(), what)?;
        // Who captured before may be gone, and that not seen yet.
        self.feed_capture();
        if self.capturing.is_some() {
            return Err("somebody captures already".to_owned());
        }
        Ok((self.devices.adapter().capture().clone(), mac, snap))
    }

    fn check_operator(&self, client: &UnixStream) -> Result<(), String> {
        let user = getsockopt(client, PeerCredentials).map(|peer| Uid::from_raw(peer.uid()));
        let may = user.is_ok_and(|user| user.is_root() || user == self.operator);
        let who = "only root and the user that started the process may do that";
        may.then_some(()).ok_or_else(|| who.to_owned())
    }

    /// The answer to a request about what devices there are, if it is one.
    fn of_devices(
        &self,
        client: &UnixStream,
        request: &[u8],
        passed: Option<UnixListener>,
    ) -> Option<Result<Value, String>> {
        if request == b"list\n" {
            return Some(Ok(list(&self.devices)));
        }
        if let Some(asked) = request.strip_prefix(b"set ") {
            let set = || self.set(asked, passed);
            return Some(self.check_operator(client).and_then(|()| set()));
        }
        if let Some(change) = request.strip_prefix(b"limits ") {
            let change = || self.set_limits(change);
            return Some(self.check_operator(client).and_then(|()| change()));
        }
        if request == b"limits\n" {
            return Some(Ok(limits_of(&self.devices)));
        }
        if request == b"counters\n" {
            return Some(Ok(counters_of(&self.devices)));
        }
        let _ = request.strip_prefix(b"remove ")?;
        let remove = || self.remove(request);
        Some(self.check_operator(client).and_then(|()| remove()))
    }

    fn set(&self, asked: &[u8], passed: Option<UnixListener>) -> Result<Value, String> {
        let asked: Asked = serde_json::from_slice(asked).map_err(|error| error.to_string())?;
        let name = asked.device.socket.display().to_string();
        let outcome = self.devices.set(asked, passed);
        became(&name, outcome)
    }

    fn set_limits(&self, change: &[u8]) -> Result<Value, String> {
        let change: LimitsChange =
            serde_json::from_slice(change).map_err(|error| error.to_string())?;
        let settings = self.devices.settings();
        let device = find(&settings, &change.device)?;
        let outcome = self.devices.set_limits(&device.name, &change.limits);
        became(&device.name, outcome)
    }

    fn remove(&self, request: &[u8]) -> Result<Value, String> {
        let line = line_of(request)?;
        let name = line.strip_prefix("remove ").unwrap_or(line);
        let settings = self.devices.settings();
        let device = find(&settings, name)?;
        let removed = self.devices.remove(&device.name);
        let kept = removed.map_err(|error| sentence(&error))?;
        Ok(json!({ "name": device.name, "outcome": "removed", "kept": kept }))
    }
}

/// The answer to who asked for a device, or for a change of it.
fn became(name: &str, outcome: Result<Outcome, devices::Error>) -> Result<Value, String> {
    let outcome = match outcome.map_err(|error| sentence(&error))? {
        Outcome::Added => "added",
        Outcome::Changed => "changed",
        Outcome::Same => "same",
    };
    Ok(json!({ "name": name, "outcome": outcome }))
}

/// The limits of all devices: those that are in force for the VM, if one is attached.
fn limits_of(devices: &Devices) -> Value {
    let rnics = devices.adapter().rnics();
    let of = |device: RnicSettings| {
        let vm = rnics.iter().find(|rnic| rnic.is_of(&device));
        let footprint = vm.map(|rnic| rnic.vm().tables().footprint.limit());
        let limits = Limits {
            footprint: footprint.or(device.limits.footprint),
            memory: Some(device.limits.memory()),
            ..device.limits
        };
        let mut limits = json!(limits);
        let share = device.share.settings();
        limits["weight"] = share.weight.into();
        limits["bytes_per_second"] = json!(share.bytes_per_second);
        limits["messages_per_second"] = json!(share.messages_per_second);
        json!({ "name": device.name, "mac": mac_text(&device.mac), "limits": limits })
    };
    let limits = devices.settings().into_iter().map(of);
    json!({ "devices": limits.collect::<Vec<_>>() })
}

/// The counters of all VMs.
fn counters_of(devices: &Devices) -> Value {
    let of = |rnic: &Arc<Rnic>| {
        let RnicSettings { name, mac, .. } = &rnic.settings;
        json!({ "name": name, "mac": mac_text(mac), "counters": rnic.counters() })
    };
    let rnics = devices.adapter().rnics();
    json!({ "devices": rnics.iter().map(of).collect::<Vec<_>>() })
}

/// All devices, with a VM or without.
fn list(devices: &Devices) -> Value {
    let rnics = devices.adapter().rnics();
    let of = |(device, front_end): (RnicSettings, FrontEnd)| Listed {
        mac: mac_text(&device.mac),
        link_up: device.link.is_up(),
        attached: rnics.iter().any(|rnic| rnic.is_of(&device)),
        name: device.name,
        network: device.network,
        front_end,
    };
    let listed: Vec<_> = devices.listed().into_iter().map(of).collect();
    json!({ "devices": listed, "kept": devices.kept_sockets() })
}

/// The address whose frames are to be captured, or all, and how much of each.
fn to_capture(devices: &[RnicSettings], what: &[u8]) -> Result<(Option<[u8; 6]>, usize), String> {
    let no_line = "the request is: capture snap=BYTES [DEVICE]";
    let line = what.strip_suffix(b"\n").ok_or(no_line)?;
    let line = std::str::from_utf8(line).map_err(|_| no_line)?;
    let (snap, device) = line.split_once(' ').ok_or(no_line)?;
    let snap = snap
        .strip_prefix("snap=")
        .and_then(|snap| snap.parse().ok());
    let snap = snap.ok_or(no_line)?;
    if device.is_empty() {
        return Ok((None, snap));
    }
    match find(devices, device)?.mac {
        // Its frames cannot be told from others.
        NO_MAC => Err(format!(
            "'{device}' has no MAC address in the configuration"
        )),
        mac => Ok((Some(mac), snap)),
    }
}

fn answer(adapter: &Adapter, devices: &[RnicSettings], request: &[u8]) -> Value {
    if request.is_empty() || request == b"\n" {
        return adapter.status();
    }
    let other = if request.starts_with(b"faults ") {
        Some(change_faults(adapter, devices, request))
    } else if request.starts_with(b"fail ") {
        Some(fail_object(adapter, devices, request))
    } else if request.starts_with(b"hold ") {
        Some(hold(adapter, devices, request))
    } else {
        None
    };
    if let Some(result) = other {
        return result.unwrap_or_else(|error| json!({ "error": error }));
    }
    match command(devices, request) {
        Ok((device, up)) => {
            adapter.set_link(&device.link, up);
            let state = if up { "up" } else { "down" };
            info!(device = device.name; "{}: the link was taken {state}", device.name);
            json!({ "name": device.name, "link_up": up })
        }
        Err(error) => json!({ "error": error }),
    }
}

/// The line that a request is.
fn line_of(request: &[u8]) -> Result<&str, &'static str> {
    request
        .strip_suffix(b"\n")
        .filter(|_| request.len() <= MAX_REQUEST)
        .and_then(|line| std::str::from_utf8(line).ok())
        .ok_or("the request is not a line")
}

/// The name of a device, which may have spaces, and the two words behind it, of a request that begins with
/// `name`; `form` is what should be there.
fn words_of<'a>(request: &'a [u8], name: &str, form: &str) -> Result<[&'a str; 3], String> {
    let line = line_of(request)?;
    let mut words = line.strip_prefix(name).unwrap_or(line).rsplitn(3, ' ');
    match (words.next(), words.next(), words.next()) {
        (Some(last), Some(second), Some(device)) => Ok([device, second, last]),
        _ => Err(format!("the request is: {name}{form}")),
    }
}

/// Gives the frames of a device faults, or none any longer; returns the answer.
fn change_faults(
    adapter: &Adapter,
    devices: &[RnicSettings],
    request: &[u8],
) -> Result<Value, String> {
    let [device, direction, faults] =
        words_of(request, "faults ", "DEVICE in|out|both FAULTS|off")?;
    let device = find(devices, device)?;
    let directions: &[Direction] = match direction {
        "in" => &[Direction::In],
        "out" => &[Direction::Out],
        "both" => &[Direction::Out, Direction::In],
        _ => return Err(format!("faults are in, out or both, not '{direction}'")),
    };
    let wanted = faults.parse::<FaultsOrOff>();
    let FaultsOrOff(wanted) = wanted.map_err(|error| error.to_string())?;
    for direction in directions {
        let set = adapter.set_faults(device, *direction, wanted.as_deref().copied());
        set.map_err(|error| error.to_string())?;
    }
    info!(device = device.name; "{}: faults {direction}: {faults}", device.name);
    Ok(json!({ "name": device.name, "faults": faults }))
}

/// Has frames of a device wait, or no longer; returns the answer.
fn hold(adapter: &Adapter, devices: &[RnicSettings], request: &[u8]) -> Result<Value, String> {
    let [device, direction, from] = words_of(request, "hold ", "DEVICE in|out NUMBER|off")?;
    let device = find(devices, device)?;
    let direction = match direction {
        "in" => Direction::In,
        "out" => Direction::Out,
        _ => return Err(format!("frames wait in or out, not '{direction}'")),
    };
    let bad = |_| format!("'{from}' is not a number");
    let from = match from {
        "off" => None,
        from => Some(from.parse().map_err(bad)?),
    };
    let held = adapter.hold_frames(device, direction, from);
    let (frames, waits) = held.map_err(|error| error.to_string())?;
    Ok(json!({ "name": device.name, "frames": frames, "waits": waits }))
}

/// Puts an object of the VM of a device in error; returns the answer.
fn fail_object(
    adapter: &Adapter,
    devices: &[RnicSettings],
    request: &[u8],
) -> Result<Value, String> {
    let [device, kind, number] = words_of(request, "fail ", "DEVICE qp|cq NUMBER")?;
    let device = find(devices, device)?;
    let bad = |_| format!("'{number}' is not a number");
    let number = number.parse().map_err(bad)?;
    let what = match kind {
        "qp" => Failing::Qp(number),
        "cq" => Failing::Cq(number),
        _ => return Err(format!("a qp or a cq fails, not a '{kind}'")),
    };
    if !adapter.fail(device, what) {
        return Err(format!("{} has no {kind} {number} in use", device.name));
    }
    info!(device = device.name; "{}: {kind} {number} was put in error", device.name);
    Ok(json!({ "name": device.name, "failed": number }))
}

/// The device whose link is to change, and whether it is to be up.
fn command<'a>(
    devices: &'a [RnicSettings],
    request: &[u8],
) -> Result<(&'a RnicSettings, bool), String> {
    let line = line_of(request)?;
    let (device, state) = line
        .strip_prefix("link ")
        .and_then(|rest| rest.rsplit_once(' '))
        .ok_or(
            "the requests are: list, link DEVICE up|down, faults DEVICE in|out|both FAULTS|off, \
             hold DEVICE in|out NUMBER|off, fail DEVICE qp|cq NUMBER, limits [JSON], counters, \
             capture snap=BYTES [DEVICE], set JSON, remove DEVICE",
        )?;
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
    fn what_is_captured_is_all_or_of_a_device_with_an_address() {
        let mut devices = devices();
        devices[1].mac = NO_MAC;
        let of = |request: &str| to_capture(&devices, request.as_bytes());
        assert_eq!(of("snap=100 \n"), Ok((None, 100)));
        assert_eq!(of("snap=1 /run/a b\n"), Ok((Some(devices[0].mac), 1)));
        for (request, said) in [
            ("snap=1 /run/c\n", "no MAC address"),
            ("snap=1 nobody\n", "nobody"),
            ("snap=x \n", "the request is"),
            ("snap=1\n", "the request is"),
            ("snap=1 ", "the request is"),
        ] {
            let error = of(request).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
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
