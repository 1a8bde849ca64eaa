// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The cache of slow, stable artefacts: `$XDG_CACHE_HOME/virtio-rdma/NAME-KEY/`, where KEY is a
//! hash of what the artefact is made from.
//!
//! An entry is made under another name and renamed when it is complete, so an entry that exists is
//! whole. A lock per name keeps two commands from making the same thing at once.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use rustix::fs::{flock, FlockOperation};

use crate::shell;

/// Entries of a name that nobody used for this long go when a new one is made.
const KEPT: Duration = Duration::from_secs(14 * 24 * 3600);

/// A hash of inputs (FNV-1a, 64 bits: it tells versions of our own files apart, nothing more).
#[derive(Clone, Copy)]
pub struct Key(u64);

impl Key {
    /// The key of no inputs.
    pub fn new() -> Self {
        Key(0xcbf2_9ce4_8422_2325)
    }

    /// Adds bytes and their length.
    pub fn bytes(mut self, data: &[u8]) -> Self {
        for byte in data.iter().chain(&(data.len() as u64).to_le_bytes()) {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
        self
    }

    /// Adds a text.
    pub fn text(self, text: &str) -> Self {
        self.bytes(text.as_bytes())
    }

    /// Adds a file, or all files of a tree: their paths in it and contents.
    pub fn path(self, path: &Path) -> Result<Self> {
        self.tree(path, Path::new(""))
    }

    fn tree(mut self, base: &Path, below: &Path) -> Result<Self> {
        let path = if below.as_os_str().is_empty() {
            base.to_path_buf()
        } else {
            base.join(below)
        };
        let context = || format!("cannot read {}", path.display());
        if !fs::metadata(&path).with_context(context)?.is_dir() {
            let data = fs::read(&path).with_context(context)?;
            return Ok(self
                .bytes(below.as_os_str().as_encoded_bytes())
                .bytes(&data));
        }
        let mut names = fs::read_dir(&path)
            .with_context(context)?
            .map(|entry| Ok(entry?.file_name()))
            .collect::<std::io::Result<Vec<_>>>()
            .with_context(context)?;
        names.sort();
        for name in names {
            self = self.tree(base, &below.join(name))?;
        }
        Ok(self)
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Where the cache is.
pub fn directory() -> Result<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir),
        None => PathBuf::from(std::env::var_os("HOME").context("HOME is not set")?).join(".cache"),
    };
    let dir = base.join("virtio-rdma");
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    Ok(dir)
}

/// The entry `name` for `key`, made by `make` (which gets an empty directory to fill) if it is not
/// there.
pub fn entry(name: &str, key: Key, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let dir = directory()?;
    let path = dir.join(format!("{name}-{key}"));
    if touch(&path) {
        return Ok(path);
    }
    let lock = File::create(dir.join(format!("{name}.lock")))?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        shell::say(format_args!(
            "{name}: waiting for another command that makes it"
        ));
        flock(&lock, FlockOperation::LockExclusive)?;
    }
    if touch(&path) {
        return Ok(path);
    }
    let unfinished = dir.join(format!("{name}-{key}.part"));
    shell::remove(&unfinished)?;
    fs::create_dir(&unfinished)?;
    make(&unfinished)?;
    fs::write(unfinished.join(".used"), "")?;
    fs::rename(&unfinished, &path)?;
    prune(&dir, name, &path)?;
    Ok(path)
}

/// A program of crates.io, which is built unless it is there.
pub fn program(name: &str, version: &str) -> Result<PathBuf> {
    let directory = entry(name, Key::new().text(version), |directory| {
        shell::step(&format!("Building {name}"), || {
            let build = directory.join("build");
            let mut cargo = shell::cargo();
            cargo
                .args(["install", name, "--locked", "--version", version])
                .arg("--root")
                .arg(directory)
                .env("CARGO_TARGET_DIR", &build);
            shell::logged(name, &mut cargo)?;
            shell::remove(&build)
        })
    })?;
    Ok(directory.join("bin").join(name))
}

/// Notes the use of an entry; false if there is none.
fn touch(path: &Path) -> bool {
    if !path.is_dir() {
        return false;
    }
    // Best effort: a cache that we may read but not write is still a cache.
    let _ = File::create(path.join(".used"));
    true
}

/// Removes old entries of a name, but for `keep`.
fn prune(dir: &Path, name: &str, keep: &Path) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let key = path
            .file_name()
            .and_then(|file| file.to_str())
            .and_then(|file| file.strip_prefix(name)?.strip_prefix('-'));
        let ours =
            key.is_some_and(|key| key.len() == 16 && key.bytes().all(|b| b.is_ascii_hexdigit()));
        let used = fs::metadata(path.join(".used"))
            .and_then(|meta| meta.modified())
            .unwrap_or(SystemTime::UNIX_EPOCH);
        if ours && path != keep && used.elapsed().is_ok_and(|age| age > KEPT) {
            shell::remove(&path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_tell_inputs_apart() {
        let key = |parts: &[&str]| {
            parts
                .iter()
                .fold(Key::new(), |key, part| key.text(part))
                .to_string()
        };
        assert_eq!(key(&["a", "b"]), key(&["a", "b"]));
        assert_ne!(key(&["a", "b"]), key(&["ab", ""]));
        assert_ne!(key(&["a"]), key(&["b"]));
        assert_eq!(key(&[]).len(), 16);
    }
}
