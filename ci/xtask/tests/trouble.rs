// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What docs/trouble.md says that the parts say is what they say, and what they say is there.

use std::fs;
use std::path::{Path, PathBuf};

/// Where messages are, and those that others have: QEMU without the patches, and rdma-core.
const FOLDERS: [&str; 3] = ["device/src", "guest-driver/kernel/src", "qemu/patches"];
const OF_OTHERS: [&str; 3] = [
    "is not a valid device model name",
    "Failed to connect to",
    "retry counter exceeded",
];

/// Messages that need not be listed, and why.
const EXEMPT: &[(&str, &str)] = &[
    // The device.
    ("has ended by itself", "completes `worker … panicked`"),
    ("the thread of", "a panic is in the log before it"),
    (
        "the status thread panicked",
        "a panic is in the log before it",
    ),
    ("the watchdog panicked", "a panic is in the log before it"),
    ("the protocol was violated", "completes `disconnected`"),
    ("the system refused", "completes `disconnected`"),
    ("panicked", "completes `worker …`"),
    ("virtqueue …: …", "only names the virtqueue"),
    (
        "address … is not guest memory",
        "a guest gets it as a status",
    ),
    ("a page list is malformed", "a guest gets it as a status"),
    (
        "there is no memory for a page list",
        "a guest gets it as a status",
    ),
    // The module.
    ("RDMA device ready", "no error"),
    ("a command", "names a command that has no name"),
];

/// So many letters make a message of its own; what has less completes another one.
const LEAST_LETTERS: usize = 8;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The texts of all sources below a folder.
fn add_texts(folder: &Path, texts: &mut Vec<(PathBuf, String)>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        if path.is_dir() {
            add_texts(&path, texts);
        } else if matches!(extension, Some("rs" | "c" | "patch")) {
            let text = fs::read_to_string(&path).unwrap();
            // Tests are at the end.
            let end = text.find("#[cfg(test)]\nmod tests {");
            texts.push((path, text[..end.unwrap_or(text.len())].to_owned()));
        }
    }
}

/// A text without what breaks it into lines, and without spaces.
fn joined(text: &str) -> String {
    let mut joined = String::new();
    for line in text.lines() {
        let line = line.strip_prefix('+').unwrap_or(line).trim();
        if line.starts_with("//") || line.starts_with("* ") {
            continue;
        }
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

/// The literals that follow these words, numbers and names in them as `…`.
fn literals(text: &str, words: &[&str], found: &mut Vec<String>) {
    for word in words {
        for rest in text.split(word).skip(1) {
            // Behind other arguments, if there are any.
            let Some(at) = rest.find(['"', ';', '{']) else {
                continue;
            };
            let rest = &rest[at..];
            // A line of the log may have keys and values before its text.
            let Some(rest) = rest.strip_prefix(';').unwrap_or(rest).strip_prefix('"') else {
                continue;
            };
            let mut literal = String::new();
            let mut chars = rest.chars();
            while let Some(c) = chars.next() {
                match c {
                    '"' => break,
                    '\\' => match chars.next() {
                        Some('n') | None => {}
                        Some(c) => literal.push(c),
                    },
                    '{' => {
                        chars.by_ref().find(|c| *c == '}');
                        literal.push('…');
                    }
                    // The conversions of C that there are.
                    '%' => {
                        chars.by_ref().find(|c| "udsxp".contains(*c));
                        literal.push('…');
                    }
                    c => literal.push(c),
                }
            }
            found.push(literal);
        }
    }
}

/// What is said to those who have the device, the module or QEMU, without spaces.
fn said() -> Vec<String> {
    let mut all = Vec::new();
    for folder in FOLDERS {
        let mut texts = Vec::new();
        add_texts(&root().join(folder), &mut texts);
        for (path, text) in texts {
            let is_rust = path.extension().is_some_and(|extension| extension == "rs");
            if folder == "guest-driver/kernel/src" && is_rust {
                // They are made in one place and told in another, and nothing else has spaces.
                let lines = text.lines().filter(|line| !line.trim().starts_with("//"));
                let parts = lines.flat_map(|line| line.split('"').skip(1).step_by(2));
                let parts = parts.filter(|part| part.contains(' '));
                all.extend(parts.map(|part| part.replace(' ', "")));
                continue;
            }
            let text = joined(&text);
            let words: &[&str] = match folder {
                "device/src" => &[
                    "#[error(",
                    "warn!(",
                    "error!(",
                    ".warn(format_args!(",
                    "device.warn(",
                    "self.warn(",
                ],
                "guest-driver/kernel/src" => &["dev_err(", "dev_warn("],
                _ => &[
                    "error_setg(",
                    "error_setg_errno(",
                    "error_report(",
                    "warn_report(",
                ],
            };
            literals(&text, words, &mut all);
        }
    }
    all
}

/// The messages that the page lists, without spaces.
fn listed() -> Vec<String> {
    let page = fs::read_to_string(root().join("docs/trouble.md")).unwrap();
    let mut listed = Vec::new();
    let mut wanted = false;
    for line in page.lines() {
        wanted |= line.starts_with("| it says |");
        wanted &= line.starts_with('|');
        let cell = line.split('|').nth(1).filter(|_| wanted);
        let messages = cell
            .into_iter()
            .flat_map(|cell| cell.split('`').skip(1).step_by(2));
        listed.extend(messages.map(|message| message.replace(char::is_whitespace, "")));
    }
    listed
}

fn letters(text: &str) -> usize {
    text.chars().filter(|c| c.is_alphabetic()).count()
}

#[test]
fn messages_are_those_of_the_sources() {
    let mut texts = Vec::new();
    for folder in FOLDERS {
        add_texts(&root().join(folder), &mut texts);
    }
    let texts: String = texts.iter().map(|(_, text)| joined(text)).collect();
    let texts = texts.replace("\\\"", "\"");
    let listed = listed();
    assert!(listed.len() > 150, "{}", listed.len());
    for message in listed {
        let of_others = |other: &&str| message.contains(&other.replace(' ', ""));
        if OF_OTHERS.iter().any(of_others) {
            continue;
        }
        for part in message.split('…') {
            let part = part.replace("''", "");
            assert!(
                texts.contains(&part),
                "nothing says '{part}' of '{message}'"
            );
        }
    }
}

#[test]
fn messages_of_the_sources_are_listed() {
    let said = said();
    assert!(said.len() > 200, "{}", said.len());
    let mut known = listed();
    known.extend(EXEMPT.iter().map(|(text, _)| text.replace(' ', "")));
    known.retain(|text| letters(text) >= LEAST_LETTERS);
    let is_listed = |text: &str| {
        known
            .iter()
            .any(|it| text.contains(it.trim_matches(['…', ':'])))
    };
    let missing: Vec<_> = said
        .iter()
        .filter(|text| letters(text) >= LEAST_LETTERS && !is_listed(text))
        .collect();
    assert!(missing.is_empty(), "docs/trouble.md lacks {missing:#?}");
}
