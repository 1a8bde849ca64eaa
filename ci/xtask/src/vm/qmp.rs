// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A small QMP client: one command at a time, events are skipped.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{bail, Context, Result};
use serde_json::{json, Value};

/// QEMU answers at once or something is wrong.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A connection to a VM's QMP socket.
pub struct Qmp {
    reader: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects and leaves capability negotiation.
    pub fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let mut qmp = Qmp {
            reader: BufReader::new(stream),
        };
        qmp.line().context("no QMP greeting")?;
        qmp.execute("qmp_capabilities")?;
        Ok(qmp)
    }

    /// Runs a command without arguments and returns its result.
    pub fn execute(&mut self, command: &str) -> Result<Value> {
        let request = json!({ "execute": command }).to_string() + "\n";
        self.reader.get_mut().write_all(request.as_bytes())?;
        loop {
            let mut answer = self.line().with_context(|| format!("QMP {command}"))?;
            if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            }
            if let Some(error) = answer.get("error") {
                bail!("QMP {command}: {error}");
            }
        }
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.reader.read_line(&mut line)? == 0 {
            bail!("QEMU closed the connection");
        }
        Ok(serde_json::from_str(&line)?)
    }
}
