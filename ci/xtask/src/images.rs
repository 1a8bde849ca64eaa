// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest images and the root in which the kernel module is compiled, made by the scripts in
//! `qemu/images/`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{ensure, Context, Result};
use clap::ValueEnum;

use crate::cache::{self, Key};
use crate::shell;

/// A suite of Debian that guests have their user space from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Suite {
    /// Debian 13, with rdma-core 56.1
    Trixie,
    /// What Debian develops, with rdma-core 65
    Sid,
}

impl Suite {
    /// Its name in Debian.
    pub fn name(self) -> &'static str {
        match self {
            Suite::Trixie => "trixie",
            Suite::Sid => "sid",
        }
    }

    /// The version of its rdma-core, as `guest-driver/provider/set-up.sh` knows it.
    pub fn rdma_core(self) -> &'static str {
        match self {
            Suite::Trixie => "56.1",
            Suite::Sid => "65.0",
        }
    }

    /// The name of its part of the cache: what was there first has no suite in its name.
    pub fn entry(self, name: &str) -> String {
        match self {
            Suite::Trixie => name.to_owned(),
            Suite::Sid => format!("{name}-{}", self.name()),
        }
    }
}

/// A guest kernel, and with it the user space that it runs with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kernel {
    /// Debian 13's own, 6.12
    Trixie,
    /// The one of trixie-backports, 7.x, with Debian 13's user space
    Backports,
    /// The one of sid, 7.x, with sid's user space
    Sid,
}

impl Kernel {
    /// Those that run Debian 13, for what is to run on more than one. Sid changes by the day.
    pub const STABLE: [Kernel; 2] = [Kernel::Trixie, Kernel::Backports];

    /// All of them.
    const ALL: [Kernel; 3] = [Kernel::Trixie, Kernel::Backports, Kernel::Sid];

    /// Its name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Trixie => "trixie",
            Kernel::Backports => "backports",
            Kernel::Sid => "sid",
        }
    }

    /// The suite of the user space it runs with.
    pub fn suite(self) -> Suite {
        match self {
            Kernel::Trixie | Kernel::Backports => Suite::Trixie,
            Kernel::Sid => Suite::Sid,
        }
    }
}

/// The suites of some kernels, each once.
pub fn suites(kernels: &[Kernel]) -> Vec<Suite> {
    let mut suites: Vec<Suite> = Vec::new();
    for kernel in kernels {
        if !suites.contains(&kernel.suite()) {
            suites.push(kernel.suite());
        }
    }
    suites
}

/// A root image that guests boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Image {
    /// rdma-core, perftest, and what lanes measure with
    Plain,
    /// Servers and clients of storage, too
    Storage,
    /// UCX, libfabric, Open MPI with its compiler, and qperf, too
    Software,
    /// Debian as its installer leaves it, with systemd, on a disk of its own
    #[value(skip)]
    System,
    /// libvirt and AppArmor, too: for hosts of VMs
    Libvirt,
}

impl Image {
    /// The name of its part of the cache.
    fn entry(self) -> &'static str {
        match self {
            Image::Plain => "guest-root",
            Image::Storage => "guest-storage",
            Image::Software => "guest-software",
            Image::System => "guest-system",
            Image::Libvirt => "guest-libvirt",
        }
    }

    /// The packages of Debian that it has and [`Image::Plain`] has not; those that may be installed
    /// in [`Image::System`].
    fn packages(self) -> &'static [&'static str] {
        match self {
            Image::Plain => &[],
            Image::Storage => &[
                "e2fsprogs",
                "fio",
                "nvme-cli",
                "nfs-kernel-server",
                "nfs-common",
                "kexec-tools",
            ],
            Image::Software => &[
                "conmon",
                "crun",
                "gcc",
                "infiniband-diags",
                "libc6-dev",
                "libfabric-bin",
                "libopenmpi-dev",
                "openmpi-bin",
                "openssh-client",
                "openssh-server",
                "podman",
                "qperf",
                "ucx-utils",
            ],
            Image::System => &[
                "bindgen",
                "dkms",
                "gcc",
                "ibverbs-utils",
                "libibverbs-dev",
                "make",
                "perftest",
                "rdma-core",
                "rust-src",
                "rustc",
            ],
            Image::Libvirt => &[
                "apparmor",
                "libvirt-clients",
                "libvirt-daemon-system",
                "libxml2-utils",
            ],
        }
    }
}

impl std::fmt::Display for Suite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::fmt::Display for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Image::Plain => "plain",
            Image::Storage => "storage",
            Image::Software => "software",
            Image::System => "system",
            Image::Libvirt => "libvirt",
        })
    }
}

impl std::fmt::Display for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The root in which the kernel module is compiled, for every guest kernel of a suite.
#[derive(Clone, Debug)]
pub struct BuildRoot {
    /// The root's directory.
    pub tree: PathBuf,
    /// What it was made from.
    key: String,
}

/// What a guest kernel needs to boot a root image.
#[derive(Clone, Debug)]
pub struct KernelImage {
    /// The kernel, bzImage.
    pub vmlinuz: PathBuf,
    /// The initramfs that finds the root.
    pub initrd: PathBuf,
    /// ext4 with its modules; none if they are in the root, which is then a disk that the guest
    /// writes to.
    pub modules: Option<PathBuf>,
}

fn scripts() -> PathBuf {
    shell::root().join("qemu/images")
}

/// The Debian mirror for guests: the one that the host uses, or the official one.
/// `VIRTIO_RDMA_MIRROR` overrides both.
fn mirror() -> String {
    let from_apt = || {
        let targets = shell::capture(Command::new("apt-get").args([
            "indextargets",
            "--format",
            "$(REPO_URI)",
            "Created-By: Packages",
        ]));
        let targets = targets.ok()?;
        let found = targets
            .lines()
            .map(|uri| uri.trim_end_matches('/'))
            .find(|uri| uri.ends_with("/debian"));
        found.map(str::to_owned)
    };
    std::env::var("VIRTIO_RDMA_MIRROR")
        .ok()
        .or_else(from_apt)
        .unwrap_or_else(|| "http://deb.debian.org/debian".to_owned())
}

/// The build root of a suite.
pub fn build_root(suite: Suite) -> Result<BuildRoot> {
    let script = scripts().join("build-root.sh");
    let key = Key::new().path(&script)?;
    let name = suite.entry("build-root");
    let dir = cache::entry(&name, key, |dir| {
        let what = format!("Making the {suite} root for compiling the kernel module");
        shell::step(&what, || {
            let tree = dir.join("tree");
            shell::logged(
                &name,
                shell::as_root("bash")
                    .arg(&script)
                    .arg(&tree)
                    .arg(mirror())
                    .arg(suite.name()),
            )?;
            for kernel in Kernel::ALL.iter().filter(|kernel| kernel.suite() == suite) {
                ensure!(
                    tree.join("etc/virtio-rdma").join(kernel.name()).exists(),
                    "the root has no {kernel} kernel"
                );
            }
            Ok(())
        })
    })?;
    Ok(BuildRoot {
        tree: dir.join("tree"),
        key: key.to_string(),
    })
}

impl BuildRoot {
    /// The release of a guest kernel, as `uname -r` has it.
    pub fn release(&self, kernel: Kernel) -> Result<String> {
        let path = self.tree.join("etc/virtio-rdma").join(kernel.name());
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(text.trim().to_owned())
    }

    /// Adds what the root was made from to a key.
    pub fn key(&self, key: Key) -> Key {
        key.text(&self.key)
    }

    /// A command in the root, in a mount namespace of its own: the repository at /src (read-only,
    /// current directory), `out` at /out, and KVER set to the kernel's release.
    pub fn command(&self, kernel: Kernel, out: &Path, words: &[&str]) -> Result<Command> {
        let kernel = format!("KVER={}", self.release(kernel)?);
        enter(&self.tree, Some(&kernel), &[], out, words)
    }
}

/// The root in which packages of a suite are built.
#[derive(Clone, Debug)]
pub struct PackageRoot(PathBuf);

/// The root of a suite in which packages are built.
pub fn package_root(suite: Suite) -> Result<PackageRoot> {
    let packaging = shell::root().join("packaging");
    let script = packaging.join("build-root.sh");
    let control = packaging.join("debian/control");
    let key = Key::new().path(&script)?.path(&control)?;
    let name = suite.entry("package-root");
    let dir = cache::entry(&name, key, |dir| {
        let what = format!("Making the {suite} root for building packages");
        shell::step(&what, || {
            shell::logged(
                &name,
                shell::as_root("bash")
                    .arg(&script)
                    .arg(dir.join("tree"))
                    .arg(mirror())
                    .arg(suite.name())
                    .arg(&control),
            )
        })
    })?;
    Ok(PackageRoot(dir.join("tree")))
}

impl PackageRoot {
    /// A command in the root, as [`BuildRoot::command`], without a network.
    pub fn command(&self, out: &Path, words: &[&str]) -> Result<Command> {
        enter(&self.0, None, &["--net"], out, words)
    }
}

/// A command in a root, with one more variable of the environment, in a mount namespace of its own,
/// and others that `unshare` is asked for: the repository is at /src (read-only, current directory),
/// and `out` at /out.
fn enter(
    root: &Path,
    variable: Option<&str>,
    namespaces: &[&str],
    out: &Path,
    words: &[&str],
) -> Result<Command> {
    const SCRIPT: &str = r#"
root=$1 src=$2 out=$3; shift 3
mount --bind "$src" "$root/src"
mount -o remount,bind,ro "$root/src"
mount --bind "$out" "$root/out"
mount -t proc proc "$root/proc"
mount -t tmpfs tmp "$root/tmp"
mount --rbind /dev "$root/dev"
exec chroot "$root" /bin/sh -c 'cd /src && exec "$@"' sh "$@"
"#;
    let out = fs::canonicalize(out).with_context(|| format!("cannot find {}", out.display()))?;
    let mut command = shell::as_root("env");
    command.args([
        "-i",
        "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME=/tmp",
        "LC_ALL=C.UTF-8",
    ]);
    command.args(variable);
    command.args(["unshare", "--mount", "--propagation", "private"]);
    command.args(namespaces);
    command.args(["--", "/bin/sh", "-ec", SCRIPT, "sh"]);
    command.arg(root).arg(shell::root()).arg(out).args(words);
    Ok(command)
}

/// The QEMU of trixie-backports, as Debian has built it.
pub fn stock_qemu() -> Result<PathBuf> {
    let script = shell::root().join("qemu/stock.sh");
    let key = Key::new().path(&script)?;
    let dir = cache::entry("qemu-stock", key, |dir| {
        shell::step("Unpacking the QEMU of trixie-backports", || {
            let mut make = shell::as_root("bash");
            shell::logged("qemu-stock", make.arg(&script).arg(dir).arg(mirror()))?;
            shell::own(dir)
        })
    })?;
    Ok(dir.join("qemu-system-x86_64"))
}

/// The root image of guests of a suite.
pub fn root_image(image: Image, suite: Suite) -> Result<PathBuf> {
    let name = suite.entry(image.entry());
    let packages = image.packages();
    let (script, base, key) = if image == Image::System {
        let script = scripts().join("system.sh");
        let key = Key::new()
            .path(&script)?
            .path(&scripts().join("guest/agent"))?
            .text(&packages.join(" "));
        (script, None, key)
    } else if packages.is_empty() {
        let script = scripts().join("root.sh");
        let key = Key::new().path(&script)?.path(&scripts().join("guest"))?;
        (script, None, key)
    } else {
        let base = root_image(Image::Plain, suite)?;
        let script = scripts().join("extend.sh");
        // The base's entry has its key in its name.
        let entry = base.parent().and_then(Path::file_name);
        let key = Key::new()
            .path(&script)?
            .bytes(entry.unwrap_or_default().as_encoded_bytes())
            .text(&packages.join(" "));
        (script, Some(base), key)
    };
    let dir = cache::entry(&name, key, |dir| {
        shell::step(
            &format!("Making the {image} image of {suite} guests"),
            || {
                shell::logged(
                    &name,
                    shell::as_root("bash")
                        .arg(&script)
                        .args(&base)
                        .arg(dir.join("root.img"))
                        .arg(mirror())
                        .arg(suite.name())
                        .args(packages),
                )?;
                shell::own(dir)
            },
        )
    })?;
    Ok(dir.join("root.img"))
}

/// What a kernel of [`Image::System`] boots with; its modules are on the disk.
pub fn system_kernel(root: &Path, kernel: Kernel) -> KernelImage {
    KernelImage {
        vmlinuz: root.with_file_name(format!("vmlinuz-{kernel}")),
        initrd: root.with_file_name(format!("initrd-{kernel}")),
        modules: None,
    }
}

/// What a kernel needs to boot the root image.
pub fn kernel_image(build_root: &BuildRoot, kernel: Kernel) -> Result<KernelImage> {
    let key = build_root.key(
        Key::new()
            .path(&scripts().join("kernel.sh"))?
            .path(&scripts().join("guest/initramfs"))?,
    );
    let dir = cache::entry(&format!("kernel-{kernel}"), key, |dir| {
        let release = build_root.release(kernel)?;
        shell::step(&format!("Making the image of kernel {release}"), || {
            let words = ["bash", "/src/qemu/images/kernel.sh", &release, "/out"];
            shell::logged(
                &format!("kernel-{kernel}"),
                &mut build_root.command(kernel, dir, &words)?,
            )?;
            shell::own(dir)
        })
    })?;
    Ok(KernelImage {
        vmlinuz: dir.join("vmlinuz"),
        initrd: dir.join("initrd.img"),
        modules: Some(dir.join("modules.img")),
    })
}
