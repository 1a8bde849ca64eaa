// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the packaging says of files and names is so, and the service is confined as it should be.
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Exposure of the service, as `systemd-analyze security` counts it, at most: 0 is best, 10 worst.
const MOST_EXPOSURE: f64 = 2.0;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Is it there? The last part may be `*.md`, as in lists of debhelper.
fn exists(path: &str) -> bool {
    let Some((folder, ending)) = path.split_once("/*") else {
        return root().join(path).exists();
    };
    let entries = fs::read_dir(root().join(folder));
    entries.is_ok_and(|entries| {
        let names = entries.map(|entry| entry.unwrap().file_name());
        names
            .into_iter()
            .any(|name| name.to_string_lossy().ends_with(ending))
    })
}

#[test]
fn files_of_packages_exist() {
    let mut named = 0;
    for entry in fs::read_dir(root().join("packaging/debian")).unwrap() {
        let path = entry.unwrap().path();
        let kind = path.extension().and_then(|kind| kind.to_str());
        let lists = ["docs", "examples", "install", "manpages"];
        if !kind.is_some_and(|kind| lists.contains(&kind)) {
            continue;
        }
        for line in fs::read_to_string(&path).unwrap().lines() {
            let file = line.split_whitespace().next().unwrap();
            // What is built.
            if !file.starts_with("target/") {
                assert!(exists(file), "{} names {file}", path.display());
                named += 1;
            }
        }
    }
    assert!(named > 10, "only {named} files are named");
    // The rules name some themselves.
    let rules = read("packaging/debian/rules");
    let words = rules.split(|c: char| c.is_whitespace() || "'\"()".contains(c));
    let folders = ["packaging/", "guest-driver/", "device/", "docs/"];
    let mut named = 0;
    for file in words.filter(|word| folders.iter().any(|folder| word.starts_with(folder))) {
        assert!(exists(file), "the rules name {file}");
        named += 1;
    }
    assert!(named > 5, "the rules name {named} files only");
}

#[test]
fn the_service_is_confined() {
    let unit = root().join("packaging/systemd/vhost-device-rdma.service");
    let drop_in = root().join("packaging/systemd/netdev.conf");
    let folder = std::env::temp_dir().join(format!("packaging-{}", std::process::id()));
    let with_drop_in = folder.join("vhost-device-rdma.service");
    fs::create_dir_all(folder.join("vhost-device-rdma.service.d")).unwrap();
    fs::copy(&unit, &with_drop_in).unwrap();
    let to = folder.join("vhost-device-rdma.service.d/netdev.conf");
    fs::copy(drop_in, to).unwrap();
    for unit in [&unit, &with_drop_in] {
        let mut analyze = Command::new("systemd-analyze");
        analyze.args(["security", "--offline=true", "--no-pager"]);
        let Ok(output) = analyze.arg(unit).output() else {
            println!("there is no systemd-analyze here");
            break;
        };
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let last = text.lines().last().unwrap_or_default();
        let level = last
            .split_whitespace()
            .find_map(|word| word.parse::<f64>().ok());
        let errors = String::from_utf8_lossy(&output.stderr);
        let level = level.unwrap_or_else(|| panic!("no exposure in {text}{errors}"));
        assert!(level <= MOST_EXPOSURE, "{text}");
        assert!(errors.is_empty(), "{errors}");
    }
    fs::remove_dir_all(folder).unwrap();
}

/// The names of functions of the library in a text.
fn functions(text: &str, behind: char) -> BTreeSet<String> {
    let ends = text.match_indices(behind).map(|(at, _)| &text[..at]);
    let names = ends.map(|text| {
        let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        &text[text.trim_end_matches(is_of_name).len()..]
    });
    let ours = names.filter(|name| name.starts_with("virtio_rdma_dv_"));
    ours.map(str::to_owned).collect()
}

#[test]
fn functions_of_the_library_have_versions() {
    let header = read("guest-driver/provider/include/infiniband/virtio_rdma_dv.h");
    let declared = functions(&header, '(');
    assert!(declared.contains("virtio_rdma_dv_query_device"));
    let map = functions(&read("guest-driver/provider/libvirtio_rdma.map"), ';');
    assert_eq!(declared, map);
    let symbols = functions(&read("packaging/debian/libvirtio-rdma1.symbols"), '@');
    assert_eq!(declared, symbols);
}

#[test]
fn versions_are_those_of_the_workspace() {
    let version = format!("PACKAGE_VERSION=\"{}\"", env!("CARGO_PKG_VERSION"));
    assert!(read("guest-driver/kernel/dkms.conf").contains(&version));
}
