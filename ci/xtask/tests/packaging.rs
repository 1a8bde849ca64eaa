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

/// Adds the files below a folder.
fn add_files(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => add_files(&path, files),
            false => files.push(path),
        }
    }
}

#[test]
fn packaged_documents_lead_somewhere() {
    let rules = read("packaging/debian/rules");
    let packages = ["vhost-device-rdma", "libvirtio-rdma1", "virtio-rdma-dkms"];
    let names = packages.join(" ");
    assert!(rules.contains(&format!("for package in {names}; do")));
    let all = Path::new(env!("CARGO_TARGET_TMPDIR")).join("documents");
    let _ = fs::remove_dir_all(&all);
    let (mut count, mut lost) = (0, Vec::new());
    for package in packages {
        let folder = all.join(package);
        let mut copy = Command::new("python3");
        copy.arg(root().join("packaging/documents.py"));
        let status = copy.arg(package).arg(&folder).status().unwrap();
        assert!(status.success(), "{package}: {status}");
        let mut files = Vec::new();
        add_files(&folder, &mut files);
        let is_page = |file: &&PathBuf| file.extension().is_some_and(|extension| extension == "md");
        for page in files.iter().filter(is_page) {
            let text = fs::read_to_string(page).unwrap();
            let links = text
                .split("](")
                .skip(1)
                .filter_map(|rest| rest.split_once(')'));
            let links = links.filter_map(|(link, _)| link.split('#').next());
            for link in links.filter(|link| !link.is_empty() && !link.contains([' ', '`'])) {
                count += 1;
                // The project's pages are those of this tree.
                let leads = match link.split_once("/HEAD/") {
                    Some((_, path)) => root().join(path).exists(),
                    None => link.contains("://") || page.with_file_name(link).exists(),
                };
                if !leads {
                    lost.push(format!("{}: {link}", page.display()));
                }
            }
        }
    }
    assert!(count > 150, "{count} links");
    assert!(lost.is_empty(), "lead nowhere:\n{}", lost.join("\n"));
    let of_device = all.join("vhost-device-rdma");
    for file in [
        "README.md",
        "device/README.md",
        "docs/README.md",
        "docs/libvirt/hook",
        "docs/libvirt/domain.xml",
        "docs/grafana/vhost-device-rdma.json",
        "docs/ci/rdma.yml",
    ] {
        assert!(of_device.join(file).is_file(), "{file} is not packaged");
    }
    // The unit and the file of the configuration name pages.
    let places = [
        "packaging/systemd/vhost-device-rdma.service",
        "packaging/vhost-device-rdma.toml",
    ];
    for place in places {
        let text = read(place);
        let named = text.split("/usr/share/doc/vhost-device-rdma/").skip(1);
        let named = named.filter_map(|rest| rest.split_whitespace().next());
        for path in named.filter(|path| !path.starts_with("examples/")) {
            assert!(of_device.join(path).exists(), "{place} names {path}");
        }
    }
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
