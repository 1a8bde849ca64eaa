// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Dependencies point one way: what files import is read, and no import may point up.
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The layers of the device, the lowest first: a module imports those of its own line and of lines
/// before it.
const DEVICE: &[&[&str]] = &[
    &[
        "limits",
        "footprint",
        "error",
        "logging",
        "epoll_fd",
        "eventfd",
        "socket",
        "table",
    ],
    &["sandbox"],
    &["memory"],
    &["verbs"],
    &["probes"],
    &["engine"],
    &["fabric"],
    &["worker"],
    &["warnings"],
    &["adapter", "rnic", "rnic_status"],
    &["control"],
    &["virtio"],
    &["heap"],
    &["front_end"],
    &["vhost_user", "vfio_user"],
    &[
        "check",
        "config",
        "devices",
        "drain",
        "metrics",
        "service",
        "status",
        "manage",
        "top",
        "play",
        "wire_setup",
    ],
];

/// The files of a crate: the path of each module, and the file that it is in.
type Modules = BTreeMap<Vec<String>, PathBuf>;

/// Which file imports which.
type Imports = BTreeMap<PathBuf, BTreeSet<PathBuf>>;

fn sources(crate_: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.join(crate_).join("src")
}

fn modules(root: &Path) -> Modules {
    fn add(root: &Path, folder: &Path, modules: &mut Modules) {
        for entry in fs::read_dir(root.join(folder)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let path = folder.join(&name);
            if root.join(&path).is_dir() {
                add(root, &path, modules);
            } else if let Some(stem) = name.strip_suffix(".rs") {
                let parts = folder.iter().map(|part| part.to_str().unwrap().to_owned());
                let own = (!["mod", "lib", "main"].contains(&stem)).then(|| stem.to_owned());
                if stem != "main" {
                    modules.insert(parts.chain(own).collect(), path);
                }
            }
        }
    }
    let mut modules = Modules::new();
    add(root, Path::new(""), &mut modules);
    modules
}

/// The text without comments, and without what only tests have.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or(text);
    let lines = text.lines();
    let lines = lines.map(|line| line.split("//").next().unwrap_or(line));
    lines.collect::<Vec<_>>().join("\n")
}

/// All paths in a text that begin with `crate`, `super` or `self`, each as its parts.
fn paths(text: &str) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    let boundary = |at: usize| {
        let before = text[..at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':')
    };
    for first in ["crate::", "super::", "self::"] {
        for (at, _) in text.match_indices(first).filter(|(at, _)| boundary(*at)) {
            parse(&text[at..], &[], &mut paths);
        }
    }
    paths
}

/// Reads a path, or a list of them in braces, behind `prefix`; returns what is behind it.
fn parse<'t>(text: &'t str, prefix: &[String], paths: &mut Vec<Vec<String>>) -> &'t str {
    let text = text.trim_start();
    if let Some(mut list) = text.strip_prefix('{') {
        loop {
            list = list.trim_start();
            match list.strip_prefix('}') {
                Some(rest) => return rest,
                None if list.is_empty() => return list,
                None => {}
            }
            list = parse(list, prefix, paths);
            let end = list.find([',', '}']).unwrap_or(list.len());
            list = list[end..].strip_prefix(',').unwrap_or(&list[end..]);
        }
    }
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    let (name, rest) = text.split_at(end.unwrap_or(text.len()));
    let mut path = prefix.to_vec();
    if !name.is_empty() {
        path.push(name.to_owned());
    }
    match rest.strip_prefix("::") {
        Some(rest) if !name.is_empty() => parse(rest, &path, paths),
        _ => {
            paths.push(path);
            rest
        }
    }
}

fn imports(root: &Path) -> Imports {
    let modules = modules(root);
    let mut imports = Imports::new();
    for (module, file) in &modules {
        let text = code(&fs::read_to_string(root.join(file)).unwrap());
        for path in paths(&text) {
            let mut full = module.clone();
            for part in path {
                match part.as_str() {
                    "crate" => full.clear(),
                    "super" => drop(full.pop()),
                    "self" => {}
                    _ => full.push(part),
                }
            }
            // What is imported is in the innermost module that the path names.
            let found = (0..=full.len()).rev().find_map(|n| modules.get(&full[..n]));
            if let Some(found) = found.filter(|found| *found != file) {
                let of_file = imports.entry(file.clone()).or_default();
                of_file.insert(found.clone());
            }
        }
    }
    imports
}

/// The files that a file imports, and those that these import, and so on.
fn reached<'i>(imports: &'i Imports, from: &'i Path) -> BTreeSet<&'i Path> {
    let mut reached = BTreeSet::new();
    let mut todo = vec![from];
    while let Some(file) = todo.pop() {
        for next in imports.get(file).into_iter().flatten() {
            if reached.insert(next.as_path()) {
                todo.push(next);
            }
        }
    }
    reached
}

/// Imports between folders that are part of a circle.
fn circles(imports: &Imports) -> Vec<String> {
    let mut found = Vec::new();
    for (file, of_file) in imports {
        for other in of_file.iter().filter(|o| o.parent() != file.parent()) {
            if reached(imports, other).contains(file.as_path()) {
                found.push(format!("{} imports {}", file.display(), other.display()));
            }
        }
    }
    found
}

fn layer(file: &Path) -> Option<usize> {
    let first = file.iter().next()?.to_str()?;
    let module = first.strip_suffix(".rs").unwrap_or(first);
    DEVICE.iter().position(|layer| layer.contains(&module))
}

#[test]
fn imports_of_the_device_point_down() {
    let imports = imports(&sources("device"));
    assert!(imports.len() > 30, "only {} files were read", imports.len());
    let mut up = Vec::new();
    for (file, of_file) in imports
        .iter()
        .filter(|(file, _)| *file != Path::new("lib.rs"))
    {
        let own = layer(file).unwrap_or_else(|| panic!("{} is in no layer", file.display()));
        for other in of_file {
            let theirs = layer(other);
            if theirs.is_none_or(|theirs| theirs > own) {
                up.push(format!("{} imports {}", file.display(), other.display()));
            }
        }
    }
    assert!(up.is_empty(), "imports that point up:\n{}", up.join("\n"));
}

#[test]
fn no_circle_spans_two_folders() {
    for crate_ in ["device", "guest-driver/kernel", "guest-driver/provider"] {
        let circles = circles(&imports(&sources(crate_)));
        assert!(circles.is_empty(), "{crate_}:\n{}", circles.join("\n"));
    }
}

#[test]
fn imports_are_found() {
    let text = code(
        "use crate::a::{b::C, self, d::{E, f}};\n// use crate::no\nlet x = super::g::H::new(self::i);\n\
         #[cfg(test)]\nmod tests { use crate::no; }",
    );
    let mut found: Vec<_> = paths(&text).into_iter().map(|p| p.join("::")).collect();
    found.sort_unstable();
    let expected = [
        "crate::a::b::C",
        "crate::a::d::E",
        "crate::a::d::f",
        "crate::a::self",
        "self::i",
        "super::g::H::new",
    ];
    assert_eq!(found, expected);
}

#[test]
fn circles_are_found() {
    let file = |name: &str| PathBuf::from(name);
    let mut imports = Imports::new();
    for (from, to) in [
        ("a/x.rs", "b/y.rs"),
        ("b/y.rs", "b/z.rs"),
        ("b/z.rs", "b/y.rs"),
    ] {
        imports.entry(file(from)).or_default().insert(file(to));
    }
    assert_eq!(circles(&imports), [""; 0]);
    let z = imports.entry(file("b/z.rs")).or_default();
    z.insert(file("a/x.rs"));
    assert_eq!(circles(&imports).len(), 2);
}
