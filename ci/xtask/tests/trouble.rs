// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What docs/trouble.md says that the parts say is what they say.
use std::fs;
use std::path::{Path, PathBuf};

/// Where messages are, and those that others have: QEMU without the patches, and rdma-core.
const FOLDERS: [&str; 3] = ["device/src", "guest-driver/kernel/src", "qemu/patches"];
const OF_OTHERS: [&str; 3] = [
    "is not a valid device model name",
    "Failed to connect to",
    "retry counter exceeded",
];

fn add_texts(folder: &Path, texts: &mut String) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        if path.is_dir() {
            add_texts(&path, texts);
        } else if matches!(extension, Some("rs" | "c" | "patch")) {
            texts.push_str(&fs::read_to_string(&path).unwrap());
        }
    }
}

/// Texts without what breaks them into lines.
fn joined(text: &str) -> String {
    let mut joined = String::new();
    for line in text.lines() {
        let line = line.strip_prefix('+').unwrap_or(line).trim();
        let line = line.strip_suffix('\\').unwrap_or(line);
        // Adjacent literals of C are one.
        let line = match joined.ends_with('"') && line.starts_with('"') {
            true => {
                joined.pop();
                line.get(1..).unwrap_or_default()
            }
            false => line,
        };
        joined.push_str(line);
    }
    joined.replace(char::is_whitespace, "")
}

#[test]
fn messages_are_those_of_the_sources() {
    let root: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut texts = String::new();
    for folder in FOLDERS {
        add_texts(&root.join(folder), &mut texts);
    }
    let texts = joined(&texts);
    let page = fs::read_to_string(root.join("docs/trouble.md")).unwrap();
    let mut messages = 0;
    let mut wanted = false;
    for line in page.lines() {
        wanted |= line.starts_with("| it says |");
        wanted &= line.starts_with('|');
        let cell = line
            .strip_prefix("| `")
            .and_then(|rest| rest.split('`').next());
        let Some(message) = cell.filter(|_| wanted) else {
            continue;
        };
        messages += 1;
        if OF_OTHERS.iter().any(|other| message.contains(other)) {
            continue;
        }
        for part in message.split('…') {
            let part = part.replace(char::is_whitespace, "").replace("''", "");
            assert!(
                texts.contains(&part),
                "nothing says '{part}' of '{message}'"
            );
        }
    }
    assert!(messages > 30, "{messages}");
}
