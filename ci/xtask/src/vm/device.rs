// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device process of a bed: started with one socket per VM, asked for its status.

use std::fmt::Write;
use std::fs;
use std::io::Read;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use rustix::process::Signal;
use serde_json::Value;

use super::{host_address, mac, namespace, signal_child, spawn, switch, wait_for};

/// The longest IP packet of what leads back, bytes.
const LOOP_MTU: u16 = 9000;

/// The link-local address of a VM, which comes from its MAC address.
fn link_local(number: u8) -> String {
    format!("fe80::5054:ff:fe12:34{number:02x}")
}

/// What is between hosts.
#[derive(Clone, Copy)]
pub enum Wire {
    /// VXLAN between so many VMs, whose hosts are addresses of this one; IP packets between hosts have
    /// so many bytes at most.
    Vxlan(u8, u16),
    /// The same between hosts of their own, at [`host_address`].
    HostVxlan(u8, u16),
    /// VXLAN that leads back: what a VM sends itself goes out and comes in again.
    Loop,
    /// A switch, with IP packets of so many bytes at most.
    Switch(u16),
    /// What is between hosts of their own, on which the VM has a TAP; faults of what the device
    /// sends, if there are to be any.
    Tap(&'static str),
}

/// A running `vhost-device-rdma`.
pub struct DeviceProcess {
    child: Child,
    binary: PathBuf,
    status: PathBuf,
    log: PathBuf,
    command: Vec<String>,
    sockets: Vec<PathBuf>,
}

impl DeviceProcess {
    /// Starts the process with a socket and a MAC address for each VM; so many of them, the first
    /// ones, are for vfio-user.
    pub fn start(
        binary: &Path,
        sockets: &[(PathBuf, String)],
        vfio_user: usize,
        status: &Path,
        log: &Path,
    ) -> Result<Self> {
        let mut command = vec![binary.display().to_string()];
        for (nth, (socket, mac)) in sockets.iter().enumerate() {
            let option = match nth < vfio_user {
                true => "--vfio-user-path",
                false => "--socket-path",
            };
            command.push(option.to_owned());
            command.push(format!("{},mac={mac}", socket.display()));
        }
        command.push("--status-socket".to_owned());
        command.push(status.display().to_string());
        let sockets = sockets.iter().map(|(socket, _)| socket.clone());
        Self::start_by(binary, command, sockets.collect(), status, log)
    }

    /// Starts the process that serves VM `number` alone, as on a host of its own, by a command with
    /// this prefix. The others are at the other end of the wire.
    pub fn start_on_host(
        (prefix, binary): (Vec<String>, &Path),
        directory: &Path,
        number: u8,
        wire: Wire,
        log: &Path,
    ) -> Result<Self> {
        let at = |name: &str| directory.join(format!("{name}-{number}"));
        let (socket, status, file) = (at("rdma"), at("status"), at("config"));
        let mut text = String::new();
        let way_out = match wire {
            Wire::Vxlan(vms, mtu) | Wire::HostVxlan(vms, mtu) => {
                let host = |vm| match wire {
                    Wire::HostVxlan(..) => host_address(vm),
                    _ => format!("127.0.1.{vm}"),
                };
                let own = host(number);
                text = format!("[wire]\naddress = '{own}'\nmtu = {mtu}\n");
                for vm in 1..=vms {
                    let (host, link_local) = (host(vm), link_local(vm));
                    let _ = write!(
                        text,
                        "[[wire.host]]\naddress = '{host}'\n\
                         gids = ['10.10.0.{vm}', 'fd10::{vm}', '{link_local}']\n"
                    );
                }
                "vni = 1".to_owned()
            }
            Wire::Loop => {
                text = format!(
                    "[wire]\naddress = '127.0.1.{number}'\nmtu = {LOOP_MTU}\n\
                     [[wire.host]]\naddress = '127.0.1.{number}'\ngids = ['::/0']\n"
                );
                "vni = 1\nlocal = 'nothing'".to_owned()
            }
            Wire::Switch(mtu) => {
                let (remote, local) = switch::addresses(number);
                format!("dgram = {{ local = '{local}', remote = '{remote}', mtu = {mtu} }}")
            }
            Wire::Tap(faults) => {
                let netdev = format!("netdev = '{}'", namespace::TAP);
                match faults {
                    "" => netdev,
                    faults => format!("{netdev}\nfaults = {{ out = '{faults}' }}"),
                }
            }
        };
        let _ = write!(
            text,
            "[[device]]\nsocket = '{}'\nmac = '{}'\n{way_out}\n",
            socket.display(),
            mac(number)
        );
        fs::write(&file, text)?;
        Self::start_with_file((prefix, binary), &file, vec![socket], &status, log)
    }

    /// Starts the process that serves some VMs with ports of iWARP, by a command with this prefix:
    /// each has an address of the host. The directory leads from the addresses of `all` VMs to
    /// those, wherever these are.
    pub fn start_iwarp(
        command: (Vec<String>, &Path),
        directory: &Path,
        vms: &[u8],
        all: &[u8],
        log: &Path,
    ) -> Result<Self> {
        let host = vms.first().context("no VMs")?;
        let at = |name: &str, number: &u8| directory.join(format!("{name}-{number}"));
        let mut text = String::new();
        for vm in vms {
            let _ = write!(
                text,
                "[[device]]\nsocket = '{}'\nmac = '{}'\ntransport = 'iwarp'\n\
                 [device.iwarp]\naddress = '{}'\npeers = ['10.10.0.0/24']\n[device.iwarp.directory]\n",
                at("rdma", vm).display(),
                mac(*vm),
                host_address(*vm)
            );
            for peer in all {
                let _ = writeln!(text, "'10.10.0.{peer}' = '{}'", host_address(*peer));
            }
        }
        let (file, status) = (at("config", host), at("status", host));
        fs::write(&file, text)?;
        let sockets = vms.iter().map(|vm| at("rdma", vm)).collect();
        Self::start_with_file(command, &file, sockets, &status, log)
    }

    /// Starts the process with a configuration file, by a command with this prefix.
    fn start_with_file(
        (prefix, binary): (Vec<String>, &Path),
        file: &Path,
        sockets: Vec<PathBuf>,
        status: &Path,
        log: &Path,
    ) -> Result<Self> {
        let mut command = prefix;
        command.extend([
            binary.display().to_string(),
            "--config".to_owned(),
            file.display().to_string(),
            "--status-socket".to_owned(),
            status.display().to_string(),
        ]);
        Self::start_by(binary, command, sockets, status, log)
    }

    fn start_by(
        binary: &Path,
        command: Vec<String>,
        sockets: Vec<PathBuf>,
        status: &Path,
        log: &Path,
    ) -> Result<Self> {
        let mut device = DeviceProcess {
            child: spawn(&command, log)?,
            binary: binary.to_owned(),
            status: status.to_owned(),
            log: log.to_owned(),
            command,
            sockets,
        };
        device.wait_up()?;
        Ok(device)
    }

    /// Waits until the process listens on all its sockets.
    fn wait_up(&mut self) -> Result<()> {
        let up = wait_for(Duration::from_secs(10), || {
            self.check()?;
            // The status socket is the last one that it makes.
            Ok(self.status().is_ok().then_some(()))
        })?;
        up.context("the device does not tell its status")?;
        for socket in &self.sockets {
            ensure!(
                socket.exists(),
                "the device did not make {}",
                socket.display()
            );
        }
        Ok(())
    }

    /// Ends the process by a signal and waits for its end: KILL is a crash, TERM is how it is
    /// stopped for an upgrade.
    pub fn end(&mut self, signal: Signal) -> Result<()> {
        signal_child(&self.child, signal)?;
        let end = Instant::now() + Duration::from_secs(20);
        while self.child.try_wait()?.is_none() {
            if Instant::now() > end {
                self.child.kill()?;
                self.child.wait()?;
                bail!("the device did not end by signal {}", signal.as_raw());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Starts the process again after [`Self::end`], on the same sockets.
    pub fn start_again(&mut self) -> Result<()> {
        self.child = spawn(&self.command, &self.log)?;
        self.wait_up()
    }

    /// Takes the link of a VM's device down or up, as the host's operator does.
    pub fn set_link(&self, number: usize, up: bool) -> Result<()> {
        let mut command = Command::new(&self.binary);
        command.arg("link").arg(&self.status);
        command.arg(self.socket(number)?);
        command.arg(if up { "up" } else { "down" });
        crate::shell::capture(&mut command).map(drop)
    }

    /// Has frames of a VM's device lost, or whatever `faults` says: those that it sends, and those
    /// that come for it.
    pub fn set_faults(&self, number: usize, faults: &str) -> Result<()> {
        self.faults(number, &[faults])
    }

    /// The same with those that it sends alone: where the device at the other end has faults, too,
    /// each frame has them once.
    pub fn set_faults_out(&self, number: usize, faults: &str) -> Result<()> {
        self.faults(number, &[faults, "--direction", "out"])
    }

    fn faults(&self, number: usize, words: &[&str]) -> Result<()> {
        let mut command = Command::new(&self.binary);
        command.arg("faults").arg(&self.status);
        command.arg(self.socket(number)?).args(words);
        crate::shell::capture(&mut command).map(drop)
    }

    /// Where its socket for a VM is: `number` counts from 1.
    pub fn socket(&self, number: usize) -> Result<&Path> {
        let socket = number.checked_sub(1).and_then(|at| self.sockets.get(at));
        Ok(socket.context("the device has no such socket")?)
    }

    /// Its program.
    pub fn binary(&self) -> &Path {
        &self.binary
    }

    /// Where it tells its status.
    pub fn status_socket(&self) -> &Path {
        &self.status
    }

    /// The command line it was started with.
    pub fn command(&self) -> &[String] {
        &self.command
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its log file.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// An error if the process has ended.
    pub fn check(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!(
                "the device ended ({status}); the end of its log:\n{}",
                crate::shell::tail(&self.log, 3000)
            );
        }
        Ok(())
    }

    /// How many workers it has.
    pub fn workers(&self) -> Result<usize> {
        let status = self.status()?;
        let workers = status["workers"].as_array();
        Ok(workers.context("no workers in the device's status")?.len())
    }

    /// What it says of itself and its VMs.
    pub fn status(&self) -> Result<Value> {
        let read = || -> Result<Value> {
            let mut stream = UnixStream::connect(&self.status)?;
            stream.set_read_timeout(Some(Duration::from_secs(20)))?;
            // No request comes: the device need not wait for one.
            stream.shutdown(Shutdown::Write)?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(serde_json::from_str(&text)?)
        };
        read().context("no status from the device")
    }
}

impl Drop for DeviceProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
