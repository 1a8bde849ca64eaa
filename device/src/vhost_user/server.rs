// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sessions over vhost-user: the crate's daemon, from the connection to its end.
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use log::Level;
use vhost::vhost_user::{Error as VhostUserError, Listener};
use vhost_user_backend::Error as DaemonError;

use super::backend::{Backend, Daemon};
use crate::adapter::Adapter;
use crate::error::sentence;
use crate::front_end::{Ended, Protocol, Server, ShutDown, Vm};
use crate::rnic::RnicSettings;
use crate::sandbox::Sandbox;
use crate::socket::{self, BoundSocket};
use crate::virtio::VirtioDevice;

/// Serves VMs on `socket` by vhost-user: for each front end that connects, an rnic of `settings` is
/// attached. Its threads are confined by `sandbox`.
///
/// # Errors
/// If the system has no threads or file descriptors left.
pub fn serve(
    socket: BoundSocket,
    adapter: Arc<Adapter>,
    settings: RnicSettings,
    sandbox: &Sandbox,
) -> Result<Server, socket::Error> {
    Server::start(socket, adapter, settings, sandbox, |listener| {
        VhostUser(Listener::from(listener))
    })
}

struct VhostUser(Listener);

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error("a request was refused")]
    Refused(#[source] io::Error),
    #[error("the protocol was violated")]
    Protocol(#[source] VhostUserError),
    #[error("the system refused")]
    System(#[from] io::Error),
    #[error("{0}")]
    Daemon(DaemonError),
    #[error("a panic")]
    Panic,
}

impl From<DaemonError> for SessionError {
    fn from(error: DaemonError) -> Self {
        match error {
            DaemonError::HandleRequest(VhostUserError::ReqHandlerError(error)) => {
                Self::Refused(error)
            }
            DaemonError::HandleRequest(error) => Self::Protocol(error),
            DaemonError::WaitDaemon(_) => Self::Panic,
            error => Self::Daemon(error),
        }
    }
}

impl Protocol for VhostUser {
    const NAME: &'static str = "vhost-user";

    fn listener(&self) -> &impl AsRawFd {
        &self.0
    }

    fn serve(&mut self, vm: &Vm) -> Ended {
        match self.session(vm) {
            Ok(()) => Ended::Disconnected,
            Err(SessionError::Panic) => Ended::ByPanic,
            Err(error @ (SessionError::Refused(_) | SessionError::Protocol(_))) => {
                Ended::ByFrontEnd(sentence(&error))
            }
            Err(error) => Ended::BySystem(sentence(&error)),
        }
    }
}

impl VhostUser {
    fn session(&mut self, vm: &Vm) -> Result<(), SessionError> {
        let backend = Backend::new(vm)?;
        let mut session = Session {
            daemon: None,
            backend,
        };
        let daemon = session.daemon.insert(session.backend.daemon()?);
        let begun = vm.connection.begin(|| {
            // It does not wait: the front end is there, and nobody else accepts.
            daemon.start(&mut self.0)?;
            let handle = daemon.shutdown_handle();
            Ok::<_, SessionError>(handle.map(|handle| {
                let shut_down: ShutDown = Box::new(move || handle.shutdown());
                shut_down
            }))
        })?;
        if !begun {
            return Ok(());
        }
        let what = format_args!("a front end connected");
        vm.log.log(Level::Info, what);
        match daemon.wait() {
            Err(DaemonError::HandleRequest(VhostUserError::Disconnected)) => Ok(()),
            result => Ok(result?),
        }
    }
}

/// A front end that is served. Dropped when it is gone: returns when its threads have ended, and
/// the VM is detached.
struct Session {
    daemon: Option<Daemon>,
    backend: Arc<Backend>,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.backend.end();
        self.daemon = None;
        self.backend.device().with(VirtioDevice::detach);
    }
}
