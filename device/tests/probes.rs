// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The notes of the binary about probes, and the documentation's table of them.
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

const BINARY: &str = env!("CARGO_BIN_EXE_vhost-device-rdma");
const PROVIDER: &str = "vhost_device_rdma";

/// The probes by name, each with the number of its arguments.
type Probes = BTreeMap<String, usize>;

/// Those that the notes of the binary tell of. One may be at several places.
fn in_binary() -> Probes {
    let output = Command::new("readelf")
        .args(["--notes", "--wide", BINARY])
        .output()
        .expect("readelf, of binutils");
    let text = String::from_utf8(output.stdout).unwrap();
    let mut probes = Probes::new();
    let (mut provider, mut name) = (None, None);
    for line in text.lines() {
        let value = |key| line.split_once(key).map(|(_, value)| value);
        // The first line of a note has its type, too.
        provider = value("Provider: ").or(provider);
        name = value("Name: ").or(name);
        if let Some(location) = value("Location: ") {
            // That of a function that is not in the binary is next to 0.
            let address = location.split(',').next().unwrap();
            let address = u64::from_str_radix(address.trim_start_matches("0x"), 16);
            assert!(address.unwrap() > 0x1000, "{name:?} leads nowhere");
        }
        let Some(arguments) = value("Arguments:") else {
            continue;
        };
        let (provider, name) = (provider.take(), name.take().expect("a name"));
        if provider == Some(PROVIDER) {
            let arguments = arguments.split_whitespace().count();
            let before = probes.insert(name.to_owned(), arguments);
            assert!(before.is_none_or(|before| before == arguments), "{name}");
        }
    }
    probes
}

/// Those of the table: `| `name` | `argument`, `argument` | when |`.
fn in_documentation() -> Probes {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/operating.md");
    let text = fs::read_to_string(path).unwrap();
    let rows = text
        .lines()
        .skip_while(|line| !line.starts_with("| probe |"))
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    let probe = |row: &str| {
        let mut cells = row.split('|').skip(1).map(str::trim);
        let name = cells.next().unwrap().trim_matches('`').to_owned();
        (name, cells.next().unwrap().split(", ").count())
    };
    rows.map(probe).collect()
}

#[test]
fn probes_are_those_of_the_documentation() {
    let documented = in_documentation();
    assert!(documented.len() > 5, "{documented:?}");
    assert_eq!(in_binary(), documented);
}
