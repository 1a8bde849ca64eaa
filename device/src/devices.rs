// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The devices that the process serves: those of its configuration, and what operators add, change
//! and remove while it runs, without a word to the VMs of the others.
use std::fmt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use log::info;

use crate::adapter::{Adapter, NoFrames};
use crate::config::{self, check_together, Asked, Defaults, DeviceConfig, FrontEnd, LimitsArgs};
use crate::front_end::Server;
use crate::limits::Limits;
use crate::rnic::RnicSettings;
use crate::sandbox::Sandbox;
use crate::service::Reports;
use crate::socket::{self, BoundSocket};
use crate::{vfio_user, vhost_user};

/// Why a device is not served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is new, and no socket for it came along.
    #[error("{0} is new, and no socket that listens was passed for it")]
    NoSocket(String),
    /// There is none of that name.
    #[error("there is no device {0}")]
    Unknown(String),
    /// What is asked for makes no sense, or not now or with the others.
    #[error(transparent)]
    Config(#[from] config::Error),
    /// Its socket cannot be served.
    #[error(transparent)]
    Socket(#[from] socket::Error),
    /// Its faults have nothing to happen to.
    #[error(transparent)]
    Faults(#[from] NoFrames),
}

/// What became of a device that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It is new.
    Added,
    /// It has other settings. Its VM was disconnected, unless all that changed is what it has of the
    /// workers.
    Changed,
    /// It is as it was.
    Same,
}

/// The devices that the process serves.
pub struct Devices {
    adapter: Arc<Adapter>,
    sandbox: Sandbox,
    defaults: Defaults,
    reports: Arc<Reports>,
    all: Mutex<Vec<Device>>,
    /// What the service manager has bound for devices that there are no longer: it goes on listening,
    /// and a device may be there again.
    kept: Mutex<Vec<BoundSocket>>,
}

struct Device {
    /// What was asked for, and with which limits.
    asked: (DeviceConfig, Limits),
    settings: RnicSettings,
    server: Server,
}

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.lock();
        let names = names.iter().map(|device| &device.settings.name);
        f.debug_list().entries(names).finish()
    }
}

impl Devices {
    /// None yet, of this adapter. Threads for them are confined by `sandbox`, and the service manager
    /// hears by `reports` how many there are.
    #[must_use]
    pub fn new(
        adapter: Arc<Adapter>,
        sandbox: Sandbox,
        defaults: Defaults,
        reports: Arc<Reports>,
    ) -> Self {
        Self {
            adapter,
            sandbox,
            defaults,
            reports,
            all: Mutex::default(),
            kept: Mutex::default(),
        }
    }

    /// Serves those of the configuration at these sockets: the own GIDs of all are theirs before
    /// the first VM asks for one.
    ///
    /// # Errors
    /// If one cannot be served; those before it are.
    pub fn start(
        &self,
        devices: Vec<(DeviceConfig, RnicSettings)>,
        sockets: Vec<BoundSocket>,
    ) -> Result<(), Error> {
        for (_, settings) in &devices {
            self.adapter.reserve_gids_of(settings);
        }
        let mut all = self.lock();
        for ((asked, settings), socket) in devices.into_iter().zip(sockets) {
            let asked = (asked, self.defaults.limits);
            all.push(self.serve(socket, asked, settings)?);
        }
        self.reports.serves(all.len());
        Ok(())
    }

    /// Serves a device as it is asked for: a new one at `socket`, or at one that was kept for it, or
    /// one that is there already, whose VM is disconnected if it is to be another than before. It finds
    /// that when it comes back.
    ///
    /// # Errors
    /// If it cannot be. A device that was there is as it was then, unless the system has no file
    /// descriptors or threads left to serve it anew.
    pub fn set(&self, asked: Asked, socket: Option<UnixListener>) -> Result<Outcome, Error> {
        let limits = asked.limits.unwrap_or(self.defaults.limits);
        let asked = (asked.device, limits);
        let name = asked.0.socket.display().to_string();
        let mut all = self.lock();
        let at = position(&all, &name);
        let before = at.and_then(|at| all.get(at));
        if before.is_some_and(|before| before.asked == asked) {
            return Ok(Outcome::Same);
        }
        if let Some(before) = at.and_then(|at| all.get_mut(at)) {
            let (device, limits) = &asked;
            if *limits == before.asked.1 && device.with_share_of(&before.asked.0) == before.asked.0
            {
                return self.change_share(before, asked.0);
            }
        }
        let count = all.len() + usize::from(at.is_none());
        let mut settings = self.defaults.settings(&asked.0, limits, count)?;
        if settings.iwarp.is_some() && !self.adapter.has_iwarp() {
            return Err(config::Error::Late(asked.0.socket, "iWARP").into());
        }
        let others = all.iter().map(|device| &device.settings);
        let others = others.filter(|other| other.name != name);
        check_together(others.chain([&settings]))?;
        let (socket, outcome) = match at {
            Some(at) => {
                let before = all.swap_remove(at);
                settings.be_the_device_of(&before.settings);
                (self.end(before), Outcome::Changed)
            }
            None => {
                let path = &asked.0.socket;
                let passed = || Some(BoundSocket::of_client(path, socket?));
                let socket = self.take_kept(path).or_else(passed);
                (socket.ok_or(Error::NoSocket(name.clone()))?, Outcome::Added)
            }
        };
        self.adapter.reserve_gids_of(&settings);
        let device = self.serve(socket, asked, settings.clone());
        all.push(device.inspect_err(|_| self.adapter.unreserve_gids_of(&settings))?);
        self.reports.serves(all.len());
        let what = match outcome {
            Outcome::Added => "added",
            _ => "changed",
        };
        info!(device = name; "{name}: was {what}");
        Ok(outcome)
    }

    /// Changes limits of the device of this name. Its VM stays connected.
    ///
    /// # Errors
    /// If there is none, or they make no sense.
    pub fn set_limits(&self, name: &str, limits: &LimitsArgs) -> Result<Outcome, Error> {
        let mut all = self.lock();
        let at = position(&all, name);
        let device = at.and_then(|at| all.get_mut(at));
        let device = device.ok_or_else(|| Error::Unknown(name.to_owned()))?;
        let asked = limits.of(&device.asked.0);
        if asked == device.asked.0 {
            return Ok(Outcome::Same);
        }
        self.change_share(device, asked)
    }

    /// Changes what a device has of the workers.
    fn change_share(&self, device: &mut Device, asked: DeviceConfig) -> Result<Outcome, Error> {
        device.settings.share.set(&asked.share()?);
        device.asked.0 = asked;
        self.adapter.share_changed(&device.settings);
        let name = &device.settings.name;
        info!(device = name; "{name}: has other limits");
        Ok(Outcome::Changed)
    }

    /// Serves the one of this name no longer. Its VM is disconnected. Returns whether its socket is
    /// kept, since the service manager has bound it.
    ///
    /// # Errors
    /// If there is none.
    pub fn remove(&self, name: &str) -> Result<bool, Error> {
        let mut all = self.lock();
        let at = position(&all, name).ok_or_else(|| Error::Unknown(name.to_owned()))?;
        let device = all.swap_remove(at);
        let socket = self.end(device);
        let keep = socket.is_of_manager();
        if keep {
            self.kept().push(socket);
        }
        self.reports.serves(all.len());
        info!(device = name; "{name}: was removed");
        Ok(keep)
    }

    /// The sockets that are kept for devices that there are no longer.
    #[must_use]
    pub fn kept_sockets(&self) -> Vec<PathBuf> {
        let kept = self.kept();
        kept.iter().map(|socket| socket.path().to_owned()).collect()
    }

    fn take_kept(&self, path: &Path) -> Option<BoundSocket> {
        let mut kept = self.kept();
        let at = kept.iter().position(|socket| socket.path() == path)?;
        Some(kept.swap_remove(at))
    }

    fn kept(&self) -> MutexGuard<'_, Vec<BoundSocket>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The settings of all, and what VMMs speak at their sockets.
    #[must_use]
    pub fn listed(&self) -> Vec<(RnicSettings, FrontEnd)> {
        let of = |device: &Device| (device.settings.clone(), device.asked.0.front_end);
        self.lock().iter().map(of).collect()
    }

    /// The settings of all.
    #[must_use]
    pub fn settings(&self) -> Vec<RnicSettings> {
        let all = self.lock();
        all.iter().map(|device| device.settings.clone()).collect()
    }

    /// The adapter that they are of.
    #[must_use]
    pub fn adapter(&self) -> &Arc<Adapter> {
        &self.adapter
    }

    /// Accepts no front ends any longer. Those that are connected stay.
    pub fn close(&self) {
        for device in &*self.lock() {
            device.server.close();
        }
    }

    /// Serves none any longer.
    pub fn stop(&self) {
        for device in std::mem::take(&mut *self.lock()) {
            drop(device.server.end());
        }
    }

    fn serve(
        &self,
        socket: BoundSocket,
        asked: (DeviceConfig, Limits),
        settings: RnicSettings,
    ) -> Result<Device, Error> {
        self.adapter.begin_faults(&settings)?;
        let adapter = self.adapter.clone();
        let serve = match asked.0.front_end {
            FrontEnd::VhostUser => vhost_user::serve,
            FrontEnd::VfioUser => vfio_user::serve,
        };
        let server = serve(socket, adapter, settings.clone(), &self.sandbox)?;
        Ok(Device {
            asked,
            settings,
            server,
        })
    }

    /// Disconnects the VM of a device, and forgets what was kept for it.
    fn end(&self, device: Device) -> BoundSocket {
        let socket = device.server.end();
        self.adapter.unreserve_gids_of(&device.settings);
        self.adapter.end_faults(&device.settings);
        socket
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Device>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn position(all: &[Device], name: &str) -> Option<usize> {
    all.iter().position(|device| device.settings.name == name)
}
