// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Generates the bindings from rdma-core's private headers, and a stand-in for libibverbs to link
//! with.
//!
//! The headers come from `set-up.sh`. `VIRTIO_RDMA_RDMA_CORE` names another tree of its kind, and
//! with it the version of the private interface that the provider is built for.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// What set-up.sh fetches.
const VERSION: &str = "56.1";

fn main() {
    println!("cargo::rerun-if-env-changed=VIRTIO_RDMA_RDMA_CORE");
    println!("cargo::rerun-if-env-changed=XDG_CACHE_HOME");
    println!("cargo::rustc-check-cfg=cfg(pabi, values(\"34\", \"65\"))");
    if let Err(error) = run() {
        println!("cargo::error={error}");
    }
}

fn run() -> Result<()> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let tree = tree()?;
    let read = |name: &str| {
        let path = tree.join(name);
        println!("cargo::rerun-if-changed={}", path.display());
        fs::read_to_string(&path).map_err(|error| {
            format!(
                "{}: {error}: run guest-driver/provider/set-up.sh (or `cargo xtask test`, which does) once",
                path.display()
            )
        })
    };
    let pabi = read("pabi")?;
    let pabi = pabi.trim();
    println!("cargo::rustc-cfg=pabi=\"{pabi}\"");
    println!("cargo::rustc-env=VIRTIO_RDMA_PABI={pabi}");
    bindings(&tree.join("include"), &out)?;
    let stub = stub(&read("libibverbs.map")?, &out)?;
    println!("cargo::rustc-cdylib-link-arg={}", stub.display());
    // The loader resolves everything at once; so does the linker.
    println!("cargo::rustc-cdylib-link-arg=-Wl,--no-undefined,-z,now");
    // Applications link with it under this name, and libibverbs loads the same file.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libvirtio_rdma.so.1");
    let include = tree.join("include");
    println!(
        "cargo::rustc-env=VIRTIO_RDMA_RDMA_CORE_INCLUDE={}",
        include.display()
    );
    Ok(())
}

fn tree() -> Result<PathBuf> {
    if let Some(tree) = env::var_os("VIRTIO_RDMA_RDMA_CORE") {
        return Ok(tree.into());
    }
    let cache = match env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir),
        None => PathBuf::from(env::var_os("HOME").ok_or("HOME is not set")?).join(".cache"),
    };
    Ok(cache
        .join("virtio-rdma")
        .join(format!("rdma-core-{VERSION}")))
}

fn bindings(include: &Path, out: &Path) -> Result<()> {
    let header = include.join("infiniband/driver.h");
    let ioctl_header = include.join("rdma/ib_user_ioctl_cmds.h");
    let bindings = bindgen::Builder::default()
        .header(header.display().to_string())
        .header(ioctl_header.display().to_string())
        .clang_args(["-std=gnu11", "-D_GNU_SOURCE", "-I"])
        .clang_arg(include.display().to_string())
        .allowlist_type("verbs_.*|ibv_.*|ib_uverbs_.*|uverbs_.*|rdma_driver_id")
        .allowlist_function(
            "ibv_cmd_.*|execute_ioctl|_verbs_init_and_alloc_context|verbs_set_ops|verbs_uninit_context",
        )
        .allowlist_function("ibv_dontfork_range|ibv_dofork_range|__verbs_log")
        .allowlist_var("IBV_.*|UVERBS_.*|VERBS_.*")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .use_core()
        .formatter(bindgen::Formatter::None)
        .generate()
        .map_err(|error| format!("bindgen on {}: {error}", header.display()))?;
    bindings.write_to_file(out.join("bindings.rs"))?;
    Ok(())
}

/// Builds a library with the name and the symbol versions of libibverbs, and nothing in it: what is
/// linked with it runs with the true one.
fn stub(map: &str, out: &Path) -> Result<PathBuf> {
    let mut stanzas: Vec<(&str, String)> = Vec::new();
    let mut code = String::new();
    for line in map.lines().map(str::trim) {
        if let Some(version) = line.strip_suffix('{') {
            stanzas.push((version.trim(), String::new()));
        }
        let (Some((version, symbols)), Some(symbol)) = (stanzas.last_mut(), line.strip_suffix(';'))
        else {
            continue;
        };
        let used = version.starts_with("IBVERBS_PRIVATE_")
            || (*version == "IBVERBS_1.1"
                && ["ibv_dontfork_range", "ibv_dofork_range"].contains(&symbol));
        if used
            && symbol
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || c == '_')
        {
            symbols.push_str(line);
            code.push_str(&format!("void {symbol}(void) {{}}\n"));
        }
    }
    let script: String = stanzas
        .iter()
        .filter(|(_, symbols)| !symbols.is_empty())
        .map(|(version, symbols)| format!("{version} {{ global: {symbols} }};\n"))
        .collect();
    let (source, versions, library) = (
        out.join("stub.c"),
        out.join("stub.map"),
        out.join("libibverbs.so.1"),
    );
    fs::write(&source, code)?;
    fs::write(&versions, script)?;
    let cc = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let status = Command::new(&cc)
        .args([
            "-shared",
            "-nostdlib",
            "-fno-builtin",
            "-Wl,-soname,libibverbs.so.1",
            "-o",
        ])
        .arg(&library)
        .arg(&source)
        .arg(format!("-Wl,--version-script={}", versions.display()))
        .status()?;
    if !status.success() {
        return Err(format!(
            "{} cannot link the stand-in for libibverbs",
            cc.to_string_lossy()
        )
        .into());
    }
    Ok(library)
}
