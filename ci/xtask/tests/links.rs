// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Links in the documents lead somewhere, and the book has all pages.
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All documents, but those of others.
fn documents(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().and_then(|name| name.to_str());
        if path.is_dir() {
            if !name.is_some_and(|name| name == "target" || name.starts_with('.')) {
                documents(&path, found);
            }
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

/// The text without what is code.
fn prose(text: &str) -> String {
    let mut prose = String::new();
    let mut code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            code = !code;
        } else if !code && !line.starts_with("    ") {
            // Odd parts are between backticks.
            for part in line.split('`').step_by(2) {
                prose.push_str(part);
            }
            prose.push('\n');
        }
    }
    prose
}

/// Where links of a document lead.
fn links(text: &str) -> Vec<String> {
    let text = prose(text);
    let parts = text.split("](").skip(1);
    parts
        .filter_map(|part| Some(part.split_once(')')?.0.to_owned()))
        .collect()
}

/// The anchors that headings make.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    let mut code = false;
    for line in text.lines() {
        code ^= line.trim_start().starts_with("```");
        if code || !line.starts_with('#') {
            continue;
        }
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter_map(|c| match c {
            ' ' => Some('-'),
            c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
            _ => None,
        });
        anchors.insert(kept.collect());
    }
    anchors
}

#[test]
fn links_lead_somewhere() {
    let mut found = Vec::new();
    documents(&root(), &mut found);
    let mut known = HashMap::new();
    let (mut count, mut lost) = (0, Vec::new());
    for document in &found {
        let text = fs::read_to_string(document).unwrap();
        for link in links(&text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            count += 1;
            let (path, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = match path {
                "" => document.clone(),
                path => document.parent().unwrap().join(path),
            };
            let mut leads = target.exists();
            if leads && !anchor.is_empty() {
                let anchors = known.entry(target.clone()).or_insert_with(|| {
                    let text = fs::read_to_string(&target).unwrap_or_default();
                    // Some are written as such.
                    let written = text.split("<a id=\"").skip(1);
                    let written = written.filter_map(|rest| rest.split_once('"'));
                    let mut all = anchors(&text);
                    all.extend(written.map(|(anchor, _)| anchor.to_owned()));
                    all
                });
                leads = anchors.contains(anchor);
            }
            if !leads {
                lost.push(format!("{}: {link}", document.display()));
            }
        }
    }
    assert!(count > 100, "{count}");
    assert!(lost.is_empty(), "lead nowhere:\n{}", lost.join("\n"));
}

#[test]
fn the_book_has_all_pages() {
    let docs = root().join("docs");
    let summary = fs::read_to_string(docs.join("SUMMARY.md")).unwrap();
    let listed: BTreeSet<_> = links(&summary).into_iter().collect();
    let mut pages = Vec::new();
    documents(&docs, &mut pages);
    let names = pages.iter().map(|page| {
        let page = page.strip_prefix(&docs).unwrap();
        page.to_str().unwrap().to_owned()
    });
    let pages: BTreeSet<_> = names.filter(|name| name != "SUMMARY.md").collect();
    assert_eq!(listed, pages);
}

/// The commands of the README by which packages are installed are those of docs/install.md, which the
/// lane `packages` runs.
#[test]
fn the_readme_installs_as_the_lane_does() {
    let commands = |page: &str| -> Vec<String> {
        let text = fs::read_to_string(root().join(page)).unwrap();
        let code = text.lines().filter_map(|line| line.strip_prefix("    "));
        let code = code.filter_map(|line| Some(line.split('#').next()?.trim().to_owned()));
        let begins = ["apt-get ", "echo 'deb ", "systemctl ", "modprobe "];
        code.filter(|line| begins.iter().any(|begin| line.starts_with(begin)))
            .collect()
    };
    let run = commands("docs/install.md");
    let named = commands("README.md");
    assert!(named.len() >= 6, "{named:?}");
    for command in named {
        assert!(run.contains(&command), "docs/install.md has no {command}");
    }
}
