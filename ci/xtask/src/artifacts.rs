// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Everything a VM needs, built or taken from the cache: images, QEMU, the device, and what the guests load.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{anyhow, ensure, Context, Result};

use crate::cache::{self, Key};
use crate::images::{self, BuildRoot, Kernel, KernelImage};
use crate::shell;

/// The guest images.
#[derive(Clone, Debug)]
pub struct Images {
    /// The root image.
    pub root: PathBuf,
    /// One for each of [`Kernel::ALL`].
    pub kernels: Vec<(Kernel, KernelImage)>,
}

impl Images {
    /// The image of a kernel.
    pub fn kernel(&self, kernel: Kernel) -> Result<&KernelImage> {
        let found = self.kernels.iter().find(|(of, _)| *of == kernel);
        found
            .map(|(_, image)| image)
            .with_context(|| format!("no image of kernel {kernel}"))
    }
}

/// This project's programs for one guest kernel.
#[derive(Clone, Debug)]
pub struct Stack {
    /// `vhost-device-rdma`.
    pub device: PathBuf,
    /// What guests find at /payload.
    pub payload: PathBuf,
}

/// All of it.
#[derive(Clone, Debug)]
pub struct Everything {
    /// The guest images.
    pub images: Images,
    /// The QEMU that has our device.
    pub qemu: PathBuf,
    device: PathBuf,
    modules: Vec<(Kernel, PathBuf)>,
    provider: PathBuf,
    verbs_test: PathBuf,
}

impl Everything {
    /// The stack for a guest kernel; puts together its payload.
    pub fn stack(&self, kernel: Kernel) -> Result<Stack> {
        let found = self.modules.iter().find(|(of, _)| *of == kernel);
        let module = found
            .map(|(_, module)| module)
            .with_context(|| format!("no module for kernel {kernel}"))?;
        let payload = shell::target().join("payload").join(kernel.name());
        // Guests of another command may have the old directory mounted: replace it, do not write into it.
        shell::remove(&payload)?;
        fs::create_dir_all(&payload)?;
        for entry in fs::read_dir(shell::root().join("ci/payload"))? {
            let path = entry?.path();
            if path.is_file() {
                copy(&path, &payload)?;
            }
        }
        copy(module, &payload)?;
        copy(&self.provider, &payload)?;
        copy(&self.verbs_test, &payload)?;
        Ok(Stack {
            device: self.device.clone(),
            payload,
        })
    }
}

fn copy(file: &Path, directory: &Path) -> Result<()> {
    let name = file.file_name().context("not a file")?;
    fs::copy(file, directory.join(name))
        .with_context(|| format!("cannot copy {}", file.display()))?;
    Ok(())
}

/// The guest images alone.
pub fn images() -> Result<Images> {
    std::thread::scope(|scope| {
        let root = scope.spawn(images::root_image);
        let build_root = images::build_root()?;
        let kernels = kernel_images(&build_root)?;
        Ok(Images {
            root: join(root)?,
            kernels,
        })
    })
}

fn kernel_images(build_root: &BuildRoot) -> Result<Vec<(Kernel, KernelImage)>> {
    Kernel::ALL
        .iter()
        .map(|kernel| Ok((*kernel, images::kernel_image(build_root, *kernel)?)))
        .collect()
}

/// Builds everything, what is independent side by side: some of it waits for the network, some for the CPUs.
pub fn everything() -> Result<Everything> {
    std::thread::scope(|scope| {
        let qemu = scope.spawn(qemu);
        let root = scope.spawn(images::root_image);
        let guest = scope.spawn(|| {
            let build_root = images::build_root()?;
            let kernels = kernel_images(&build_root)?;
            let modules = Kernel::ALL
                .iter()
                .map(|kernel| Ok((*kernel, module(&build_root, *kernel)?)));
            Ok((kernels, modules.collect::<Result<Vec<_>>>()?))
        });
        let programs = programs();
        let verbs_test = verbs_test();
        let (kernels, modules) = join(guest)?;
        let images = Images {
            root: join(root)?,
            kernels,
        };
        let (device, provider) = programs?;
        Ok(Everything {
            images,
            qemu: join(qemu)?,
            device,
            modules,
            provider,
            verbs_test: verbs_test?,
        })
    })
}

fn join<T>(thread: std::thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread
        .join()
        .map_err(|_| anyhow!("a build step panicked"))?
}

/// The QEMU of `qemu/build.sh`.
fn qemu() -> Result<PathBuf> {
    let script = shell::root().join("qemu/build.sh");
    let run = || {
        let log = shell::target().join("logs/qemu.log");
        fs::create_dir_all(shell::target().join("logs"))?;
        let output = Command::new("bash")
            .arg(&script)
            .stdin(Stdio::null())
            .stderr(fs::File::create(&log)?)
            .output()
            .context("cannot run qemu/build.sh")?;
        ensure!(
            output.status.success(),
            "qemu/build.sh: {}; the end of its log:\n{}",
            output.status,
            shell::tail(&log, 4000)
        );
        let text = String::from_utf8_lossy(&output.stdout);
        let path = PathBuf::from(text.lines().last().unwrap_or_default().trim());
        ensure!(
            path.is_file(),
            "qemu/build.sh printed {path:?}, which is no file"
        );
        Ok(path)
    };
    shell::step(
        "QEMU with the device vhost-user-rdma-pci (some minutes if it is not cached)",
        run,
    )
}

/// The device and the provider, built by cargo on the host.
fn programs() -> Result<(PathBuf, PathBuf)> {
    shell::step("Building the device and the provider", || {
        let mut build = shell::cargo();
        build.args([
            "build",
            "--quiet",
            "--release",
            "--package",
            "vhost-device-rdma",
            "--package",
            "virtio-rdma-provider",
        ]);
        shell::logged("cargo-build", &mut build)
    })?;
    let release = shell::cargo_target().join("release");
    Ok((
        release.join("vhost-device-rdma"),
        release.join("libvirtio_rdma.so"),
    ))
}

/// The tests of the verbs API, built on the host.
fn verbs_test() -> Result<PathBuf> {
    let out = shell::target().join("verbs");
    let mut build = Command::new("sh");
    build.arg(shell::root().join("ci/verbs/build.sh")).arg(&out);
    shell::step("Building the tests of the verbs API", || {
        shell::logged("verbs-test", &mut build)
    })?;
    Ok(out.join("verbs-test"))
}

/// The kernel module for a guest kernel, compiled in the build root; cached, as it takes a while.
fn module(build_root: &BuildRoot, kernel: Kernel) -> Result<PathBuf> {
    let top = shell::root();
    let key = ["guest-driver/kernel", "guest-driver/core/src", "spec/src"]
        .iter()
        .try_fold(build_root.key(Key::new()), |key, path| {
            key.path(&top.join(path))
        })?;
    let dir = cache::entry(&format!("module-{kernel}"), key, |dir| {
        shell::step(
            &format!(
                "Building virtio_rdma.ko for kernel {}",
                build_root.release(kernel)?
            ),
            || {
                // What the build leaves there makes the next one quicker.
                let out = shell::target().join("module").join(kernel.name());
                fs::create_dir_all(&out)?;
                let words = ["bash", "guest-driver/kernel/build.sh", "/out"];
                let result = shell::logged(
                    &format!("module-{kernel}"),
                    &mut build_root.command(kernel, &out, &words)?,
                );
                shell::own(&out)?;
                result?;
                copy(&out.join("virtio_rdma.ko"), dir)
            },
        )
    })?;
    Ok(dir.join("virtio_rdma.ko"))
}
