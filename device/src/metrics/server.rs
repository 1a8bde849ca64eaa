// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where metrics are asked for: HTTP on a Unix socket, or on a TCP port of the loopback interface.
//!
//! One client after the other is answered, and each has a time for its request and for the answer:
//! a slow one keeps other readers of metrics waiting, and nobody else. When the process ends, it is
//! disconnected.
use std::fmt;
use std::io::{self, Write};
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use log::{error, info};
use vmm_sys_util::eventfd::{EventFd, EFD_NONBLOCK};

use super::Metrics;
use crate::sandbox::{Kind, Sandbox};
use crate::socket::{read_request, send_all, Answering, Bound, Client, Door};

/// How long a client may take for its request.
const REQUEST_TIME: Duration = Duration::from_secs(1);
/// How long a client may take to read the answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Longest request, bytes.
const MAX_REQUEST: usize = 8192;
/// Most header fields of a request.
const MAX_FIELDS: usize = 64;
/// What the answer is.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN: &str = "text/plain; charset=utf-8";

/// What accepts clients.
enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Self::Unix(listener) => listener.as_raw_fd(),
            Self::Tcp(listener) => listener.as_raw_fd(),
        }
    }
}

impl Listener {
    fn answer_one(&self, answering: &Answering, metrics: &Metrics) -> io::Result<()> {
        match self {
            Self::Unix(listener) => {
                let (mut client, _) = listener.accept()?;
                let known = client.try_clone()?.into();
                answering.answer(known, || answer(&mut client, metrics))
            }
            Self::Tcp(listener) => {
                let (mut client, _) = listener.accept()?;
                let known = client.try_clone()?.into();
                answering.answer(known, || answer(&mut client, metrics))
            }
        }
    }
}

/// Answers a client, which is then done with.
fn answer(client: &mut (impl Client + Write + AsFd), metrics: &Metrics) -> io::Result<()> {
    let whole = |request: &[u8]| request.windows(4).any(|end| end == b"\r\n\r\n");
    let request = read_request(client, REQUEST_TIME, MAX_REQUEST, whole)?;
    send_all(client, &answer_to(&request, metrics), TIMEOUT)
}

fn answer_to(request: &[u8], metrics: &Metrics) -> Vec<u8> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut parsed = httparse::Request::new(&mut fields);
    let whole = parsed
        .parse(request)
        .is_ok_and(|status| status.is_complete());
    let (Some(method), Some(target), true) = (parsed.method, parsed.path, whole) else {
        return response("400 Bad Request", PLAIN, "this is no request\n", true);
    };
    let body = method != "HEAD";
    if !matches!(method, "GET" | "HEAD") {
        return response("405 Method Not Allowed", PLAIN, "only GET and HEAD\n", body);
    }
    let path = target.split_once('?').map_or(target, |(path, _)| path);
    if path != "/metrics" {
        return response("404 Not Found", PLAIN, "metrics are at /metrics\n", body);
    }
    match metrics.text() {
        Ok(text) => response("200 OK", OPEN_METRICS, &text, body),
        Err(fmt::Error) => response("500 Internal Server Error", PLAIN, "", body),
    }
}

fn response(status: &str, kind: &str, text: &str, body: bool) -> Vec<u8> {
    let length = text.len();
    let text = if body { text } else { "" };
    let head = "Allow: GET, HEAD\r\nConnection: close";
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n{head}\r\n\r\n{text}"
    )
    .into_bytes()
}

/// Metrics that are told at an address.
pub struct MetricsServer {
    bound: Bound,
    exit: EventFd,
    answering: Arc<Answering>,
    thread: JoinHandle<()>,
}

impl MetricsServer {
    /// Tells `metrics` to everyone who asks at `bound`. Its thread is confined by `sandbox`.
    ///
    /// # Errors
    /// If the system has no threads or file descriptors left.
    pub fn start(bound: Bound, metrics: Metrics, sandbox: &Sandbox) -> io::Result<Self> {
        let listener = match &bound {
            Bound::Socket(socket) => Listener::Unix(socket.listener().map_err(io::Error::other)?),
            Bound::Port(listener) => Listener::Tcp(listener.try_clone()?),
        };
        let exit = EventFd::new(EFD_NONBLOCK)?;
        let door = Door::new(&listener, &exit)?;
        match &bound {
            Bound::Socket(_) => info!("metrics are told at {bound}"),
            Bound::Port(_) => info!("metrics are told at http://{bound}/metrics"),
        }
        let answering = Arc::new(Answering::default());
        let known = answering.clone();
        let run = move || door.serve(|| listener.answer_one(&known, &metrics));
        let thread = sandbox.spawn(Kind::Control, "metrics".into(), run)?;
        Ok(Self {
            bound,
            exit,
            answering,
            thread,
        })
    }

    /// Stops listening and removes the socket.
    pub fn stop(self) {
        if let Err(e) = self.exit.write(1) {
            error!("cannot stop telling metrics at {}: {e}", self.bound);
            return;
        }
        self.answering.end();
        if self.thread.join().is_err() {
            error!("the thread of metrics panicked");
        }
    }
}
