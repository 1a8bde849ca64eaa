// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The process's Unix sockets, and who may connect to them.
use std::io;
use std::os::unix::fs::{chown, FileTypeExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::process::umask;

/// Who may connect to a socket.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Access {
    /// Permissions, at most 0o777; none: what the umask leaves.
    pub mode: Option<u32>,
    /// Owner; none: the user of the process.
    pub owner: Option<u32>,
    /// Group; none: that of the process.
    pub group: Option<u32>,
}

/// Why a socket cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process listens on the socket.
    #[error("another process listens on {0}")]
    InUse(PathBuf),
    /// The path exists and is not a socket.
    #[error("{0} exists and is not a socket")]
    NotSocket(PathBuf),
    /// The system refused.
    #[error("cannot listen on {path}")]
    Listen {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

/// A socket that is bound. Its file is removed when this is dropped, if the process may do that.
#[derive(Debug)]
pub struct BoundSocket {
    path: PathBuf,
    listener: UnixListener,
}

impl BoundSocket {
    /// Binds a Unix socket at `path`, to which only those may connect whom `access` names. A socket
    /// file that nobody listens on any longer is replaced.
    ///
    /// # Errors
    /// If another process listens there, something that is not a socket is there, or the system
    /// refuses.
    pub fn bind(path: &Path, access: &Access) -> Result<Self, Error> {
        let listener = bind(path, access)?;
        Ok(Self {
            path: path.to_owned(),
            listener,
        })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What accepts connections: a file descriptor of its own.
    ///
    /// # Errors
    /// If the system has no file descriptors left.
    pub fn listener(&self) -> Result<UnixListener, Error> {
        self.listener
            .try_clone()
            .map_err(|source| self.error(source))
    }

    /// What the system said when this socket was to be served.
    #[must_use]
    pub fn error(&self, source: io::Error) -> Error {
        Error::Listen {
            path: self.path.clone(),
            source,
        }
    }
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        let path = self.path.display();
        match std::fs::remove_file(&self.path) {
            Ok(()) => {}
            // The directory is not that of the user that the process has become.
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                log::info!("{path} stays until the next start, which replaces it: {e}");
            }
            Err(e) => log::warn!("cannot remove {path}: {e}"),
        }
    }
}

fn bind(path: &Path, access: &Access) -> Result<UnixListener, Error> {
    let listen = |source| Error::Listen {
        path: path.to_owned(),
        source,
    };
    match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(listen(e)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(Error::NotSocket(path.to_owned()))
        }
        Ok(_) => match UnixStream::connect(path) {
            Ok(_) => return Err(Error::InUse(path.to_owned())),
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).map_err(listen)?
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(listen(e)),
        },
    }
    let listener = match access.mode {
        // Not by chmod: the socket would be open to more people until then.
        Some(mode) => {
            let before = umask(Mode::from_raw_mode(!mode & 0o777));
            let listener = UnixListener::bind(path);
            umask(before);
            listener
        }
        None => UnixListener::bind(path),
    }
    .map_err(listen)?;
    if access.owner.is_some() || access.group.is_some() {
        if let Err(source) = chown(path, access.owner, access.group) {
            let _ = std::fs::remove_file(path);
            return Err(listen(source));
        }
    }
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use vmm_sys_util::tempdir::TempDir;

    #[test]
    fn a_socket_has_the_permissions_that_it_is_to_have() {
        let directory = TempDir::new().unwrap();
        let path = directory.as_path().join("socket");
        let metadata = |access| {
            let socket = BoundSocket::bind(&path, &access).unwrap();
            let metadata = std::fs::metadata(&path).unwrap();
            drop(socket);
            assert!(!path.exists());
            (metadata.mode() & 0o7777, metadata.uid(), metadata.gid())
        };
        let own = metadata(Access::default());
        for mode in [0o600, 0o660, 0o777] {
            let access = Access {
                mode: Some(mode),
                // Nobody can give a socket away, but to himself.
                owner: Some(own.1),
                group: Some(own.2),
            };
            assert_eq!(metadata(access), (mode, own.1, own.2));
        }
        assert_eq!(metadata(Access::default()), own);
    }
}
