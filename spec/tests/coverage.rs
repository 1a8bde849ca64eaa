// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Every requirement of the texts is cited by a test somewhere in the repository, or listed in
//! `not-covered.md` with a reason. A citation is the identifier of the requirement, in a comment or
//! anywhere else in the code of a test.
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const TEXTS: [&str; 2] = [include_str!("../virtio-rdma.md"), include_str!("../srd.md")];
const NOT_COVERED: &str = include_str!("../not-covered.md");

/// Where tests are: of these directories the files below a `tests` directory, unit tests in
/// sources, and all of `ci`.
const PLACES: &[&str] = &["ci", "device", "guest-driver", "spec"];

/// Identifiers of requirements in `text`: `D-` or `G-`, capitals, `-`, three digits.
fn identifiers(text: &str) -> BTreeSet<String> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-' || c == '_'))
        .filter(|word| {
            let parts: Vec<&str> = word.split('-').collect();
            matches!(parts[..], ["D" | "G", area, n]
                if !area.is_empty()
                    && area.bytes().all(|b| b.is_ascii_uppercase())
                    && n.len() == 3
                    && n.bytes().all(|b| b.is_ascii_digit()))
        })
        .map(str::to_owned)
        .collect()
}

/// The requirements: identifiers in bold.
fn defined() -> BTreeSet<String> {
    let texts = TEXTS.iter().flat_map(|text| text.split("**["));
    texts
        .filter_map(|rest| rest.split_once("]** "))
        .map(|(id, _)| id.to_owned())
        .filter(|id| identifiers(id).len() == 1)
        .collect()
}

/// All files of a directory, without what is built or hidden.
fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(directory).unwrap_or_else(|e| panic!("{directory:?}: {e}"));
    for entry in entries {
        let path = entry.expect("a directory that can be read").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                files(&path, found);
            }
        } else if !path.is_symlink() {
            found.push(path);
        }
    }
}

/// The part of a file that is test: all of it, or, in a source, from its module of tests on.
fn test_code<'a>(path: &Path, text: &'a str) -> &'a str {
    let whole = path.components().any(|c| {
        let name = c.as_os_str();
        name == "tests" || name == "tests.rs" || name == "ci"
    });
    if whole {
        return text;
    }
    let is_rust = path.extension().is_some_and(|e| e == "rs");
    match text.find("#[cfg(test)]\nmod ") {
        Some(at) if is_rust => &text[at..],
        _ => "",
    }
}

/// What tests cite, with one place for each.
fn cited() -> BTreeMap<String, PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut cited = BTreeMap::new();
    for place in PLACES {
        let mut found = Vec::new();
        files(&root.join(place), &mut found);
        for path in found {
            let Ok(text) = fs::read_to_string(&path) else {
                continue; // Not text.
            };
            let path = path.strip_prefix(&root).unwrap_or(&path).to_owned();
            for id in identifiers(test_code(&path, &text)) {
                cited.entry(id).or_insert_with(|| path.clone());
            }
        }
    }
    cited
}

/// The rows of the list: identifiers and reason; and what is wrong with them.
fn listed(text: &str, wrong: &mut Vec<String>) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for line in text.lines().filter(|line| line.starts_with('|')) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [ids, reason] = cells[..] else {
            wrong.push(format!(
                "not-covered.md: {line:?} is not \"| requirements | reason |\""
            ));
            continue;
        };
        for id in identifiers(ids) {
            if reason.is_empty() {
                wrong.push(format!("not-covered.md: {id} has no reason"));
            }
            if all.insert(id.clone(), reason.to_owned()).is_some() {
                wrong.push(format!("not-covered.md: {id} is there twice"));
            }
        }
    }
    all
}

/// What is wrong.
fn check(
    defined: &BTreeSet<String>,
    cited: &BTreeMap<String, PathBuf>,
    not_covered: &str,
) -> Vec<String> {
    let mut wrong = Vec::new();
    let listed = listed(not_covered, &mut wrong);
    for id in defined {
        match (cited.get(id), listed.contains_key(id)) {
            (None, false) => {
                wrong.push(format!(
                    "{id}: no test cites it, and not-covered.md lacks it"
                ));
            }
            (Some(path), true) => wrong.push(format!(
                "{id}: {} cites it: take it out of not-covered.md",
                path.display()
            )),
            _ => {}
        }
    }
    for (id, path) in cited {
        if !defined.contains(id) {
            wrong.push(format!(
                "{id}: {} cites it, but there is none",
                path.display()
            ));
        }
    }
    for id in listed.keys().filter(|id| !defined.contains(*id)) {
        wrong.push(format!("{id}: not-covered.md lists it, but there is none"));
    }
    wrong
}

#[test]
fn every_requirement_is_cited_by_a_test_or_listed_with_a_reason() {
    let (defined, cited) = (defined(), cited());
    assert!(defined.len() > 200 && cited.len() > 50);
    let wrong = check(&defined, &cited, NOT_COVERED);
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    println!(
        "{} requirements: {} cited by tests, {} listed as not covered",
        defined.len(),
        cited.len(),
        defined.len() - cited.len()
    );
}

#[test]
fn what_is_wrong_is_found() {
    // (Written so that they are no citations.)
    let id = |n| format!("D-{}-00{n}", "ZZ");
    let [one, two, three] = [1, 2, 3].map(id);
    let defined = BTreeSet::from([one.clone(), two.clone()]);
    let citing = |ids: &[&String]| {
        let place = |id: &&String| ((*id).clone(), PathBuf::from("a test"));
        ids.iter().map(place).collect::<BTreeMap<_, _>>()
    };
    let row = |ids: &str, reason: &str| format!("| {ids} | {reason} |\n");
    let good = check(&defined, &citing(&[&one]), &row(&two, "why"));
    assert_eq!(good, [""; 0]);
    let found = |cited: &[&String], list: String, what: &str| {
        let wrong = check(&defined, &citing(cited), &list);
        assert!(
            wrong.iter().any(|line| line.contains(what)),
            "{what}: {wrong:?}"
        );
    };
    found(&[&one], String::new(), "not-covered.md lacks it");
    found(&[&one, &two], row(&two, "why"), "take it out");
    found(
        &[&one, &three],
        row(&two, "why"),
        "cites it, but there is none",
    );
    found(
        &[&one],
        row(&format!("{two}, {three}"), "why"),
        "lists it, but there is none",
    );
    found(&[&one], row(&two, ""), "has no reason");
    found(&[&one], row(&two, "why").repeat(2), "is there twice");
    found(&[&one], format!("| {two} |\n"), "is not");
    // Only tests count.
    let source = format!("// {one}\n#[cfg(test)]\nmod tests {{ // {two}\n}}");
    let counts = |path: &str| identifiers(test_code(Path::new(path), &source));
    assert_eq!(counts("device/src/a.rs"), BTreeSet::from([two.clone()]));
    assert_eq!(counts("device/tests/a.rs"), defined);
    assert!(counts("device/README.md").is_empty());
}
