// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Everything a VM needs, built or taken from the cache: images, QEMU, the device, and what the
//! guests load.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{anyhow, bail, ensure, Context, Result};

use crate::cache::{self, Key};
use crate::images::{self, BuildRoot, Image, Kernel, KernelImage, Suite};
use crate::packages::{self, Repositories};
use crate::shell;
use crate::vm::TEST_ID;

/// The guest images.
#[derive(Clone, Debug)]
pub struct Images {
    roots: Vec<(Image, Suite, PathBuf)>,
    kernels: Vec<(Kernel, KernelImage)>,
}

impl Images {
    /// Adds a root image for some kernels.
    pub fn add(&mut self, image: Image, kernels: &[Kernel]) -> Result<()> {
        self.roots.extend(roots(image, kernels)?);
        Ok(())
    }

    /// A root image for a kernel.
    pub fn root(&self, image: Image, kernel: Kernel) -> Result<&Path> {
        let suite = kernel.suite();
        let mut roots = self.roots.iter();
        let found = roots.find(|(is, of, _)| (*is, *of) == (image, suite));
        found
            .map(|(_, _, path)| path.as_path())
            .with_context(|| format!("no {image} image of {suite}"))
    }

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

/// Kernel modules of this project for one kernel.
#[derive(Clone, Debug)]
struct Modules {
    driver: PathBuf,
    tests: [PathBuf; 2],
}

/// All of it.
#[derive(Clone, Debug)]
pub struct Everything {
    /// The guest images.
    pub images: Images,
    /// The QEMU that has our device.
    pub qemu: PathBuf,
    /// One of Debian's that has vfio-user.
    stock_qemu: Option<PathBuf>,
    /// Guests get what makes them hosts of VMs, too.
    pub hosts: bool,
    device: PathBuf,
    modules: Vec<(Kernel, Modules)>,
    providers: Vec<(Suite, PathBuf)>,
    verbs_test: PathBuf,
    soft_iwarp: Vec<(Kernel, [PathBuf; 2])>,
    perftest: Vec<(Suite, PathBuf)>,
    packages: Option<Repositories>,
}

impl Everything {
    /// Adds Soft-iWARP for some kernels, which Debian's leave out, to what guests get.
    pub fn add_soft_iwarp(&mut self, kernels: &[Kernel]) -> Result<()> {
        for (kernel, root) in build_roots(kernels)? {
            let entry = format!("module-siw-{kernel}");
            let modules = build_modules(&root, kernel, &entry, ["siw", "siw_crc"], &["ci/siw"])?;
            self.soft_iwarp.push((kernel, modules));
        }
        Ok(())
    }

    /// Adds the Debian packages to what guests get, and those of the version that comes next.
    pub fn add_packages(&mut self) -> Result<()> {
        self.packages = Some(packages::both(Suite::Trixie)?);
        Ok(())
    }

    /// Adds perftest with SRD of our device, for some kernels, to what guests get.
    pub fn add_perftest(&mut self, kernels: &[Kernel]) -> Result<()> {
        for (kernel, root) in build_roots(kernels)? {
            let suite = kernel.suite();
            if !self.perftest.iter().any(|(of, _)| *of == suite) {
                self.perftest.push((suite, perftest(&root, kernel)?));
            }
        }
        Ok(())
    }

    /// Adds a QEMU as Debian has built it.
    pub fn add_stock_qemu(&mut self) -> Result<()> {
        self.stock_qemu = Some(images::stock_qemu()?);
        Ok(())
    }

    /// The QEMU as Debian has built it, if it was added.
    pub fn stock_qemu(&self) -> Option<&Path> {
        self.stock_qemu.as_deref()
    }

    /// Adds what makes a guest a host of VMs with the device to a payload: QEMU, the device process,
    /// and the files of docs/libvirt with those that the lane has for them.
    fn add_host(&self, payload: &Path) -> Result<()> {
        let prefix = self.qemu.ancestors().nth(2).context("QEMU has no prefix")?;
        for directory in ["bin", "share/qemu"] {
            let to = payload.join("qemu").join(directory);
            copy_files(&prefix.join(directory), &to)?;
        }
        copy(&self.device, payload)?;
        let root = shell::root();
        copy_files(&root.join("docs/libvirt"), &payload.join("libvirt"))?;
        copy_files(&root.join("ci/libvirt"), &payload.join("libvirt"))
    }

    /// The stack for a guest kernel; puts together its payload.
    pub fn stack(&self, kernel: Kernel) -> Result<Stack> {
        let suite = kernel.suite();
        let module = self.modules.iter().find(|(of, _)| *of == kernel);
        let provider = self.providers.iter().find(|(of, _)| *of == suite);
        let (Some((_, module)), Some((_, provider))) = (module, provider) else {
            bail!("nothing was built for kernel {kernel}");
        };
        let payloads = shell::target().join("payload");
        remove_old(&payloads)?;
        // Guests of another command that runs have theirs mounted.
        let payload = payloads.join(format!("{}-{}", kernel.name(), std::process::id()));
        shell::remove(&payload)?;
        copy_files(&shell::root().join("ci/payload"), &payload)?;
        copy(&module.driver, &payload)?;
        if self.stock_qemu.is_some() {
            for (file, entry) in [
                (&module.driver, module_entry as fn(u32) -> Vec<u8>),
                (provider, provider_entry),
            ] {
                let bytes = with_id(fs::read(file)?, entry)
                    .with_context(|| format!("cannot change the id in {}", file.display()))?;
                let stem = file.file_stem().context("not a file")?.to_string_lossy();
                let end = file.extension().context("not a file")?.to_string_lossy();
                fs::write(payload.join(format!("{stem}-{TEST_ID}.{end}")), bytes)?;
            }
        }
        for module in &module.tests {
            copy(module, &payload)?;
        }
        let soft_iwarp = self.soft_iwarp.iter().filter(|(of, _)| *of == kernel);
        for module in soft_iwarp.flat_map(|(_, modules)| modules) {
            copy(module, &payload)?;
        }
        if let Some((_, programs)) = self.perftest.iter().find(|(of, _)| *of == suite) {
            copy_files(programs, &payload.join("perftest"))?;
        }
        if let Some(repositories) = &self.packages {
            copy_files(&repositories.this, &payload.join("packages"))?;
            copy_files(&repositories.next, &payload.join("next"))?;
        }
        copy(provider, &payload)?;
        copy(&self.verbs_test.with_file_name("device-lost"), &payload)?;
        copy(&self.verbs_test, &payload)?;
        // For guests that start their own kernel.
        let image = self.images.kernel(kernel)?;
        copy(&image.vmlinuz, &payload)?;
        copy(&image.initrd, &payload)?;
        if self.hosts {
            self.add_host(&payload)?;
        }
        Ok(Stack {
            device: self.device.clone(),
            payload,
        })
    }
}

/// A program with [`TEST_ID`] where it has our virtio device id, which is in one such entry.
fn with_id(mut program: Vec<u8>, entry: fn(u32) -> Vec<u8>) -> Result<Vec<u8>> {
    let own = entry(virtio_rdma_spec::DEVICE_ID);
    let entries = program.windows(own.len()).enumerate();
    let places: Vec<usize> = entries
        .filter_map(|(at, bytes)| (bytes == own).then_some(at))
        .collect();
    let &[at] = places.as_slice() else {
        bail!("it has {} entries of our id", places.len());
    };
    program.splice(at..at + own.len(), entry(TEST_ID.into()));
    Ok(program)
}

/// An entry of a module's table of devices, `virtio_device_id`: the device, and any vendor.
fn module_entry(id: u32) -> Vec<u8> {
    [id.to_le_bytes(), [0xff; 4]].concat()
}

/// What a provider finds its devices by: vendor and device of PCI.
fn provider_entry(id: u32) -> Vec<u8> {
    [0x1af4, 0x1040 + id as u16].map(u16::to_le_bytes).concat()
}

/// Removes what commands have left in a directory that run no longer: the names end in their
/// process ids.
fn remove_old(directory: &Path) -> Result<()> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Ok(());
    };
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let process = name.rsplit('-').next().unwrap_or_default();
        let runs = Path::new("/proc").join(process).exists();
        if process.parse::<u32>().is_ok() && !runs {
            shell::remove(&path)?;
        }
    }
    Ok(())
}

fn copy(file: &Path, directory: &Path) -> Result<()> {
    let name = file.file_name().context("not a file")?;
    fs::copy(file, directory.join(name))
        .with_context(|| format!("cannot copy {}", file.display()))?;
    Ok(())
}

/// Copies the files of a directory to another one, which is made if it is not there.
fn copy_files(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        if path.is_file() {
            copy(&path, to)?;
        }
    }
    Ok(())
}

/// The guest images alone, for some kernels.
pub fn images(kernels: &[Kernel]) -> Result<Images> {
    std::thread::scope(|scope| {
        let roots = scope.spawn(|| roots(Image::Plain, kernels));
        let kernels = kernel_images(&build_roots(kernels)?)?;
        Ok(Images {
            roots: join(roots)?,
            kernels,
        })
    })
}

fn roots(image: Image, kernels: &[Kernel]) -> Result<Vec<(Image, Suite, PathBuf)>> {
    let suites = images::suites(kernels).into_iter();
    suites
        .map(|suite| Ok((image, suite, images::root_image(image, suite)?)))
        .collect()
}

/// The build root of each kernel.
fn build_roots(kernels: &[Kernel]) -> Result<Vec<(Kernel, BuildRoot)>> {
    let kernels = kernels.iter();
    kernels
        .map(|kernel| Ok((*kernel, images::build_root(kernel.suite())?)))
        .collect()
}

fn kernel_images(build_roots: &[(Kernel, BuildRoot)]) -> Result<Vec<(Kernel, KernelImage)>> {
    let build_roots = build_roots.iter();
    build_roots
        .map(|(kernel, root)| Ok((*kernel, images::kernel_image(root, *kernel)?)))
        .collect()
}

/// Builds everything for some kernels, what is independent side by side: some of it waits for the
/// network, some for the CPUs.
pub fn everything(kernels: &[Kernel]) -> Result<Everything> {
    std::thread::scope(|scope| {
        let qemu = scope.spawn(qemu);
        let roots = scope.spawn(|| roots(Image::Plain, kernels));
        let guest = scope.spawn(|| {
            let build_roots = build_roots(kernels)?;
            let images = kernel_images(&build_roots)?;
            let modules = build_roots
                .iter()
                .map(|(kernel, root)| Ok((*kernel, modules(root, *kernel)?)));
            Ok((images, modules.collect::<Result<Vec<_>>>()?))
        });
        let programs = programs(&images::suites(kernels));
        let verbs_test = verbs_test();
        let (kernels, modules) = join(guest)?;
        let images = Images {
            roots: join(roots)?,
            kernels,
        };
        let (device, providers) = programs?;
        Ok(Everything {
            images,
            qemu: join(qemu)?,
            stock_qemu: None,
            hosts: false,
            device,
            modules,
            providers,
            verbs_test: verbs_test?,
            soft_iwarp: Vec::new(),
            perftest: Vec::new(),
            packages: None,
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

/// The device, and the provider for each suite, built by cargo on the host.
fn programs(suites: &[Suite]) -> Result<(PathBuf, Vec<(Suite, PathBuf)>)> {
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
    let providers = suites.iter().map(|suite| {
        let path = match suite {
            // What the build takes by itself.
            Suite::Trixie => release.join("libvirtio_rdma.so"),
            Suite::Sid => provider(*suite)?,
        };
        Ok((*suite, path))
    });
    Ok((
        release.join("vhost-device-rdma"),
        providers.collect::<Result<_>>()?,
    ))
}

/// The tests of the verbs API, built on the host, once; beside them is what sees a device go.
fn verbs_test() -> Result<PathBuf> {
    static BUILT: AtomicBool = AtomicBool::new(false);
    let out = shell::target().join("verbs");
    let program = out.join("verbs-test");
    if BUILT.load(Ordering::SeqCst) {
        return Ok(program);
    }
    let mut build = Command::new("sh");
    build.arg(shell::root().join("ci/verbs/build.sh")).arg(&out);
    shell::step("Building the tests of the verbs API", || {
        shell::logged("verbs-test", &mut build)
    })?;
    BUILT.store(true, Ordering::SeqCst);
    Ok(program)
}

/// The provider for another rdma-core than the build takes by itself.
fn provider(suite: Suite) -> Result<PathBuf> {
    let version = suite.rdma_core();
    shell::step(
        &format!("Building the provider for rdma-core {version}"),
        || {
            let name = format!("rdma-core-{version}");
            let mut set_up = Command::new("sh");
            set_up
                .arg(shell::root().join("guest-driver/provider/set-up.sh"))
                .arg(version);
            shell::logged(&format!("{name}-set-up"), &mut set_up)?;
            // In a directory of its own: the two would build each other anew every time.
            let target = shell::cargo_target().join(&name);
            let mut build = shell::cargo();
            build
                .args(["build", "--quiet", "--release"])
                .args(["--package", "virtio-rdma-provider", "--target-dir"])
                .arg(&target)
                .env("VIRTIO_RDMA_RDMA_CORE", cache::directory()?.join(&name));
            shell::logged(&format!("{name}-build"), &mut build)?;
            Ok(target.join("release/libvirtio_rdma.so"))
        },
    )
}

/// The directory of perftest's programs with SRD of our device, compiled in the build root.
fn perftest(build_root: &BuildRoot, kernel: Kernel) -> Result<PathBuf> {
    let suite = kernel.suite();
    let name = suite.entry("perftest");
    let sources = [
        "ci/perftest",
        "ci/verbs/dv-stub.sh",
        "guest-driver/provider/include",
    ];
    let key = key(build_root, &sources)?;
    let dir = cache::entry(&name, key, |dir| {
        let what = format!("Building perftest with SRD for {suite}");
        shell::step(&what, || {
            let out = dir.join("programs");
            fs::create_dir(&out)?;
            let words = ["sh", "ci/perftest/build.sh", "/out"];
            shell::logged(&name, &mut build_root.command(kernel, &out, &words)?)?;
            shell::own(dir)
        })
    })?;
    Ok(dir.join("programs"))
}

/// The modules for a guest kernel, compiled in the build root.
fn modules(build_root: &BuildRoot, kernel: Kernel) -> Result<Modules> {
    let [driver] = build_modules(
        build_root,
        kernel,
        // The driver was there first.
        &format!("module-{kernel}"),
        ["virtio_rdma"],
        &["guest-driver/kernel", "guest-driver/core/src", "spec/src"],
    )?;
    let tests = build_modules(
        build_root,
        kernel,
        &format!("module-kernel_verbs_test-{kernel}"),
        ["kernel_verbs_test", "slow_resolve"],
        &["ci/kernel-verbs"],
    )?;
    Ok(Modules { driver, tests })
}

/// The key of what is built in a root from some files of the repository.
fn key(build_root: &BuildRoot, sources: &[&str]) -> Result<Key> {
    let key = build_root.key(Key::new());
    let mut sources = sources.iter();
    sources.try_fold(key, |key, path| key.path(&shell::root().join(path)))
}

/// Modules for a guest kernel, made by the build.sh in the first of `sources`; cached as `entry`,
/// as it takes a while.
fn build_modules<const N: usize>(
    build_root: &BuildRoot,
    kernel: Kernel,
    entry: &str,
    names: [&str; N],
    sources: &[&str],
) -> Result<[PathBuf; N]> {
    let key = key(build_root, sources)?;
    let files = names.map(|name| format!("{name}.ko"));
    let dir = cache::entry(entry, key, |dir| {
        let release = build_root.release(kernel)?;
        let what = format!("Building {} for kernel {release}", files.join(" and "));
        shell::step(&what, || {
            // What the build leaves there makes the next one quicker.
            let out = shell::target().join("module").join(kernel.name());
            fs::create_dir_all(&out)?;
            let script = format!("{}/build.sh", sources.first().context("no sources")?);
            let words = ["bash", &script, "/out"];
            let result = shell::logged(entry, &mut build_root.command(kernel, &out, &words)?);
            shell::own(&out)?;
            result?;
            files.iter().try_for_each(|file| copy(&out.join(file), dir))
        })
    })?;
    Ok(files.map(|file| dir.join(file)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_get_another_device_id_where_they_have_ours() {
        let module = |id: u8| [&b"code"[..], &[id, 0, 0, 0, 255, 255, 255, 255], b"more"].concat();
        assert_eq!(with_id(module(42), module_entry).unwrap(), module(35));
        assert!(with_id(module(41), module_entry).is_err());
        assert!(with_id([module(42), module(42)].concat(), module_entry).is_err());
        let provider = |id: u8| [&b"code"[..], &[0xf4, 0x1a, id, 0x10], b"more"].concat();
        let changed = with_id(provider(0x6a), provider_entry);
        assert_eq!(changed.unwrap(), provider(0x63));
    }
}
