// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian packages of what is in the repository, from a tarball of the sources on.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{ensure, Context, Result};

use crate::images::{self, Suite};
use crate::{cache, shell};

/// The source package.
const NAME: &str = "virtio-rdma";
/// The file beside packages that says what they were built from.
const INPUTS: &str = "inputs";

/// What packages are built from: all files that git knows, as they are in the tree.
#[derive(Clone, Debug)]
pub struct Sources {
    /// The version of what is built.
    pub version: String,
    /// The commit that has the files.
    commit: String,
    /// When that is, seconds of Unix.
    epoch: String,
}

impl Sources {
    /// Those of the tree.
    pub fn of_tree() -> Result<Self> {
        let head = git(&["rev-parse", "HEAD"])?;
        // What is changed and not committed is in a commit without a name.
        let changed = git(&["stash", "create"])?;
        let untracked = git(&["ls-files", "--others", "--exclude-standard"])?;
        if !untracked.is_empty() {
            shell::say("What git does not know is left out; `git add` it");
        }
        let tag = format!("v{}", env!("CARGO_PKG_VERSION"));
        let tags = git(&["tag", "--points-at", "HEAD"])?;
        let release = changed.is_empty() && tags.lines().any(|at| at == tag);
        let version = version(&Revision {
            release,
            commits: &git(&["rev-list", "--count", "HEAD"])?,
            commit: &git(&["rev-parse", "--short=8", "HEAD"])?,
            changed: !changed.is_empty(),
        });
        Ok(Self {
            version,
            commit: if changed.is_empty() { head } else { changed },
            epoch: git(&["log", "-1", "--format=%ct", "HEAD"])?,
        })
    }

    /// What git calls the files that packages are built from: the same if they are the same.
    fn inputs(&self) -> Result<String> {
        let paths = [
            "Cargo.lock",
            "Cargo.toml",
            "README.md",
            "SECURITY.md",
            "device",
            "docs",
            "guest-driver",
            "packaging",
            "spec",
        ];
        let objects = paths.map(|path| format!("{}:{path}", self.commit));
        let mut words = vec!["rev-parse"];
        words.extend(objects.iter().map(String::as_str));
        git(&words)
    }

    /// Writes the tarballs of the source package to a directory: this project's files, and beside
    /// them what others have written and the build takes.
    fn pack(&self, directory: &Path, suite: Suite) -> Result<()> {
        let tarball = |component: &str| {
            directory.join(format!("{NAME}_{}.orig{component}.tar.xz", self.version))
        };
        let archive = directory.join("sources.tar");
        let prefix = format!("--prefix={NAME}-{}/", self.version);
        shell::capture(
            Command::new("git")
                .current_dir(shell::root())
                .args(["archive", "--format=tar"])
                .arg(prefix)
                .arg(format!("--mtime=@{}", self.epoch))
                .arg("-o")
                .arg(&archive)
                .arg(&self.commit),
        )?;
        compress(&archive, &tarball(""))?;
        let vendor = directory.join("vendor");
        self.vendor(&vendor, suite)?;
        let archive = directory.join("vendor.tar");
        shell::capture(
            Command::new("tar")
                .args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner"])
                .args(["--mode=u+rw,go=rX", "--format=gnu"])
                .arg(format!("--mtime=@{}", self.epoch))
                .arg("-C")
                .arg(directory)
                .arg("-cf")
                .arg(&archive)
                .arg("vendor"),
        )?;
        compress(&archive, &tarball("-vendor"))?;
        shell::remove(&vendor)
    }

    /// What others have written: the crates that Cargo.lock names, and rdma-core's headers.
    fn vendor(&self, directory: &Path, suite: Suite) -> Result<()> {
        let crates = directory.join("crates");
        let mut vendor = shell::cargo();
        vendor.args(["vendor", "--locked", "--versioned-dirs", "--quiet"]);
        shell::capture(vendor.arg(&crates))?;
        let mut tree = shell::cargo();
        tree.args(["tree", "--locked", "--workspace", "--edges", "all"])
            .args(["--target", "x86_64-unknown-linux-gnu"])
            .args(["--prefix", "none", "--format", "{p}"]);
        let used = shell::capture(&mut tree)?;
        let used: HashSet<String> = used.lines().filter_map(directory_of).collect();
        for entry in fs::read_dir(&crates)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if !used.contains(name.as_ref()) {
                hollow(&path).with_context(|| format!("cannot shorten {name}"))?;
            }
        }
        let headers = cache::directory()?.join(format!("rdma-core-{}", suite.rdma_core()));
        let mut copy = Command::new("cp");
        copy.arg("-R").arg(headers).arg(directory.join("rdma-core"));
        shell::capture(&mut copy).map(drop)
    }
}

/// What git says of the tree.
struct Revision<'a> {
    release: bool,
    commits: &'a str,
    commit: &'a str,
    changed: bool,
}

/// The version of the sources: that of the workspace once it is released, and before that one that is
/// less, and grows with every commit.
fn version(of: &Revision) -> String {
    let version = env!("CARGO_PKG_VERSION");
    if of.release {
        return version.to_owned();
    }
    let changed = if of.changed { ".changed" } else { "" };
    format!("{version}~git{}.{}{changed}", of.commits, of.commit)
}

/// The directory of a crate that `cargo tree` names as `name v1.2.3`; none for those of the
/// workspace, whose paths are behind that.
fn directory_of(line: &str) -> Option<String> {
    let line = line.trim_end_matches(" (*)");
    let line = line.trim_end_matches(" (proc-macro)");
    let (name, version) = line.split_once(" v")?;
    (!version.contains(' ')).then(|| format!("{name}-{version}"))
}

/// Leaves of a crate what cargo reads of one that it does not compile: those for other systems are
/// the greater part.
fn hollow(directory: &Path) -> Result<()> {
    let manifest = fs::read(directory.join("Cargo.toml"))?;
    let sums = fs::read(directory.join(".cargo-checksum.json"))?;
    let mut sums: serde_json::Value = serde_json::from_slice(&sums)?;
    sums["files"] = serde_json::json!({});
    fs::remove_dir_all(directory)?;
    fs::create_dir_all(directory.join("src"))?;
    fs::write(directory.join("Cargo.toml"), manifest)?;
    fs::write(directory.join("src/lib.rs"), "")?;
    fs::write(directory.join(".cargo-checksum.json"), sums.to_string())?;
    Ok(())
}

fn git(words: &[&str]) -> Result<String> {
    let mut command = Command::new("git");
    let output = shell::capture(command.current_dir(shell::root()).args(words));
    output.map(|text| text.trim().to_owned())
}

/// Compresses a file, always to the same bytes, and removes it.
fn compress(file: &Path, to: &Path) -> Result<()> {
    let mut xz = Command::new("xz");
    shell::capture(xz.args(["-6", "--threads=1", "--force"]).arg(file))?;
    let mut made = file.as_os_str().to_owned();
    made.push(".xz");
    fs::rename(&made, to).with_context(|| format!("cannot create {}", to.display()))
}

/// Packages, and the same ones as the version that comes next. Each is a repository for apt.
#[derive(Clone, Debug)]
pub struct Repositories {
    /// The packages.
    pub this: PathBuf,
    /// Those of the next version.
    pub next: PathBuf,
}

/// Builds the packages of the tree for a suite, also as the version that comes next, unless those
/// are there that were built from the same files.
pub fn both(suite: Suite) -> Result<Repositories> {
    let sources = Sources::of_tree()?;
    let directory = shell::target().join("packages");
    let repositories = Repositories {
        this: directory.join(suite.name()),
        next: directory.join(format!("{}-next", suite.name())),
    };
    let inputs = sources.inputs()?;
    let there = [&repositories.this, &repositories.next]
        .into_iter()
        .all(|directory| {
            fs::read_to_string(directory.join(INPUTS)).is_ok_and(|of_last| of_last == inputs)
        });
    if !there {
        build(&sources, suite, true)?;
    }
    Ok(repositories)
}

/// Builds the packages for a suite, if asked to also as the version that comes `next`. Returns the
/// directory that has them and the sources, which is a repository for apt.
pub fn build(sources: &Sources, suite: Suite, next: bool) -> Result<PathBuf> {
    let root = images::package_root(suite)?;
    let directory = shell::target().join("packages");
    let work = directory.join("build").join(suite.name());
    shell::remove(&work)?;
    fs::create_dir_all(&work)?;
    if suite != Suite::Trixie {
        let mut set_up = Command::new("sh");
        set_up
            .arg(shell::root().join("guest-driver/provider/set-up.sh"))
            .arg(suite.rdma_core());
        shell::logged("rdma-core-set-up", &mut set_up)?;
    }
    shell::step("Packing the sources", || sources.pack(&work, suite))?;
    let version = revision(&sources.version, suite);
    let next = next.then(|| next_revision(sources, suite));
    shell::step(&format!("Building packages {version} for {suite}"), || {
        let script = ["bash", "packaging/build.sh", "/out"];
        let mut words = script.to_vec();
        words.extend([version.as_str(), &sources.epoch, suite.name()]);
        words.extend(next.as_deref());
        let log = format!("package-{suite}");
        let result = shell::logged(&log, &mut root.command(&work, &words)?);
        shell::own(&work)?;
        result
    })?;
    let repository = directory.join(suite.name());
    let inputs = sources.inputs()?;
    publish(&work.join("repository"), &repository, &inputs)?;
    if next.is_some() {
        let next = directory.join(format!("{}-next", suite.name()));
        publish(&work.join("next"), &next, &inputs)?;
    }
    shell::remove(&work)?;
    Ok(repository)
}

/// Puts a repository that was made in the place of the last one, with a note of what it is made from.
fn publish(made: &Path, repository: &Path, inputs: &str) -> Result<()> {
    let there = made.join("Packages").is_file();
    ensure!(there, "there is no repository in {}", made.display());
    fs::write(made.join(INPUTS), inputs)?;
    shell::remove(repository)?;
    fs::rename(made, repository).with_context(|| format!("cannot create {}", repository.display()))
}

/// The version of packages: those of a suite that comes later are newer.
fn revision(version: &str, suite: Suite) -> String {
    match suite {
        Suite::Trixie => format!("{version}-1~deb13"),
        Suite::Sid => format!("{version}-1"),
    }
}

/// The version that comes next.
fn next_revision(sources: &Sources, suite: Suite) -> String {
    revision(&format!("{}+next", sources.version), suite)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_grow_up_to_the_release() {
        let of = |release, commits, changed| {
            version(&Revision {
                release,
                commits,
                commit: "0123abcd",
                changed,
            })
        };
        let release = env!("CARGO_PKG_VERSION");
        assert_eq!(of(true, "12", false), release);
        let at = |commits| of(false, commits, false);
        assert_eq!(at("12"), format!("{release}~git12.0123abcd"));
        let changed = of(false, "12", true);
        assert_eq!(changed, format!("{release}~git12.0123abcd.changed"));
        let in_order = |less: &str, more: &str| {
            let mut dpkg = Command::new("dpkg");
            dpkg.args(["--compare-versions", less, "lt", more]);
            dpkg.status().is_ok_and(|status| status.success())
        };
        let trixie = revision(&at("12"), Suite::Trixie);
        for (less, more) in [
            (at("9"), at("12")),
            (at("12"), changed),
            (at("12"), format!("{}+next", at("12"))),
            (at("999"), of(true, "1", false)),
            (trixie.clone(), revision(&at("12"), Suite::Sid)),
            (trixie, revision(&at("13"), Suite::Trixie)),
        ] {
            assert!(in_order(&less, &more), "{less} is not before {more}");
        }
    }

    #[test]
    fn crates_of_others_are_found_by_their_directories() {
        let at = |line| directory_of(line);
        assert_eq!(at("libc v0.2.1").as_deref(), Some("libc-0.2.1"));
        assert_eq!(at("libc v0.2.1 (*)").as_deref(), Some("libc-0.2.1"));
        assert_eq!(
            at("clap_derive v4.5.0 (proc-macro)").as_deref(),
            Some("clap_derive-4.5.0")
        );
        assert_eq!(at("xtask v0.1.0 (/src/ci/xtask)"), None);
        assert_eq!(at(""), None);
    }
}
