// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The threat model names a test for what it says: each of them exists.
use std::fs;
use std::path::{Path, PathBuf};

/// Where tests are.
const FOLDERS: [&str; 5] = ["device", "guest-driver", "ci/xtask/src", "ci/verbs", "spec"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Adds the texts of all files below a folder that may have tests.
fn add_texts(folder: &Path, texts: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().and_then(|name| name.to_str());
        let extension = path.extension().and_then(|extension| extension.to_str());
        if path.is_dir() {
            if name != Some("target") {
                add_texts(&path, texts);
            }
        } else if matches!(extension, Some("rs" | "c")) {
            texts.push(fs::read_to_string(&path).unwrap());
        }
    }
}

/// The names in the last column of tables whose last column has this title.
fn named(text: &str) -> Vec<&str> {
    let mut names = Vec::new();
    let mut counts = false;
    for line in text.lines() {
        let Some(row) = line.strip_suffix('|').filter(|row| row.starts_with('|')) else {
            counts = false;
            continue;
        };
        let last = row.rsplit('|').next().unwrap_or_default();
        counts |= last.trim() == "shown by";
        if counts {
            names.extend(last.split('`').skip(1).step_by(2));
        }
    }
    names
}

#[test]
fn tests_of_the_threat_model_exist() {
    let text = fs::read_to_string(root().join("docs/threat-model.md")).unwrap();
    let names: Vec<_> = named(&text)
        .into_iter()
        .filter(|name| !name.contains(['/', '.']))
        .collect();
    assert!(names.len() > 40, "only {} names were read", names.len());
    let mut all = Vec::new();
    for folder in FOLDERS {
        add_texts(&root().join(folder), &mut all);
    }
    let exists = |name: &str| {
        let forms = [format!("fn {name}("), format!("TEST({name}")];
        all.iter()
            .any(|text| forms.iter().any(|form| text.contains(form)))
    };
    let missing: Vec<_> = names.iter().filter(|name| !exists(name)).collect();
    assert!(missing.is_empty(), "there are no such tests: {missing:?}");
}

#[test]
fn names_are_found() {
    let text =
        "| a | shown by |\n|---|---|\n| `x` | `y`, `z` |\n\n| b | c |\n|---|---|\n| d | `e` |";
    assert_eq!(named(text), ["y", "z"]);
}
