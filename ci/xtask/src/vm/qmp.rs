// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A small QMP client: one command at a time, and events are kept until somebody waits for them.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use serde_json::{json, Value};

/// QEMU answers at once or something is wrong.
const TIMEOUT: Duration = Duration::from_secs(30);

/// How many events are kept: nobody waits for most of them.
const EVENTS: usize = 64;

/// A connection to a VM's QMP socket.
pub struct Qmp {
    reader: BufReader<UnixStream>,
    events: VecDeque<Value>,
}

impl Qmp {
    /// Connects and leaves capability negotiation.
    pub fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let mut qmp = Qmp {
            reader: BufReader::new(stream),
            events: VecDeque::new(),
        };
        qmp.line().context("no QMP greeting")?;
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs a command and returns its result. Its arguments are an object, which may be empty.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let request = json!({ "execute": command, "arguments": arguments }).to_string() + "\n";
        self.reader.get_mut().write_all(request.as_bytes())?;
        loop {
            let mut answer = self.line().with_context(|| format!("QMP {command}"))?;
            if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            }
            if let Some(error) = answer.get("error") {
                bail!("QMP {command}: {error}");
            }
            self.keep(answer);
        }
    }

    /// Forgets the events of before, so that the next that is waited for is a new one.
    pub fn forget_events(&mut self) {
        self.events.clear();
    }

    /// Waits for an event and returns its data.
    pub fn wait_event(&mut self, name: &str, timeout: Duration) -> Result<Value> {
        let end = Instant::now() + timeout;
        loop {
            if let Some(at) = self.events.iter().position(|event| event["event"] == name) {
                let event = self.events.remove(at).unwrap_or_default();
                return Ok(event["data"].clone());
            }
            if Instant::now() > end {
                bail!("no event {name} in {timeout:?}");
            }
            // QEMU is asked for something, so that a read never waits for long.
            self.execute("query-status", json!({}))?;
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn keep(&mut self, event: Value) {
        if self.events.len() == EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.reader.read_line(&mut line)? == 0 {
            bail!("QEMU closed the connection");
        }
        Ok(serde_json::from_str(&line)?)
    }
}
