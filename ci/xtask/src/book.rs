// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The pages of the book in `docs/`, whose commands lanes run as they stand there.
//!
//! Before each block of code a page says, in a comment that no reader sees, what runs it:
//!
//! | comment | the block |
//! |---|---|
//! | `run in vm1` | is run in that VM of the lane that runs the page |
//! | `run in vm1, goes on` | the same, and what follows does not wait for its end |
//! | `run on the host` | is run on a host that is made for the page |
//! | `run on the host, goes on` | the same, and what follows does not wait for its end |
//! | `run here` | is run on this machine, at the top of the repository |
//! | `configuration` | is what a device process is started with, until the next one |
//! | `file NAME` | is written to that file of the host |
//! | `run by lane LANE: NAME` | is run by that lane, in its own order, by that name |
//! | `not run: REASON` | is not run |
//! | `shown` | has no command |

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{ensure, Context, Result};

use crate::{cache, setup, shell};

/// The version of mdBook that is built where there is none.
const MDBOOK: &str = "0.5.4";

/// A page.
pub struct Page {
    /// The name of its file in `docs/`.
    pub name: String,
    /// Its blocks of code, in their order.
    pub blocks: Vec<Block>,
}

/// A block of code.
#[derive(Debug, PartialEq, Eq)]
pub struct Block {
    /// The line of the page that it begins at.
    pub line: usize,
    /// What becomes of it.
    pub fate: Fate,
    /// What is in it.
    pub text: String,
}

/// What becomes of a block.
#[derive(Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is run there.
    Run {
        /// Where.
        place: Place,
        /// Nobody waits for its end.
        goes_on: bool,
    },
    /// It is the configuration of a device process.
    Configuration,
    /// It is the content of a file.
    File(String),
    /// A lane runs it.
    Lane {
        /// The lane.
        lane: String,
        /// The block's name there.
        name: String,
    },
    /// It is not run, and why.
    NotRun(String),
    /// There is nothing to run.
    Shown,
}

/// Where a block is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the VM of that number.
    Vm(u8),
    /// On a host that is made for the page.
    Host,
    /// On this machine.
    Here,
}

impl Fate {
    /// What a comment says.
    fn parse(comment: &str) -> Option<Self> {
        if let Some(reason) = comment.strip_prefix("not run: ") {
            return Some(Fate::NotRun(reason.to_owned()));
        }
        if let Some(file) = comment.strip_prefix("file ") {
            return Some(Fate::File(file.to_owned()));
        }
        if let Some(rest) = comment.strip_prefix("run by lane ") {
            let (lane, name) = rest.split_once(": ")?;
            let (lane, name) = (lane.to_owned(), name.to_owned());
            return Some(Fate::Lane { lane, name });
        }
        let (place, goes_on) = match comment.strip_suffix(", goes on") {
            Some(place) => (place, true),
            None => (comment, false),
        };
        let place = match place {
            "run on the host" => Place::Host,
            "run here" => Place::Here,
            "configuration" => return Some(Fate::Configuration),
            "shown" => return Some(Fate::Shown),
            _ => Place::Vm(place.strip_prefix("run in vm")?.parse().ok()?),
        };
        Some(Fate::Run { place, goes_on })
    }
}

impl Page {
    /// Reads a page of `docs/`.
    pub fn read(name: &str) -> Result<Self> {
        let path = shell::root().join("docs").join(name);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        Self::parse(name, &text)
    }

    fn parse(name: &str, text: &str) -> Result<Self> {
        let mut blocks = Vec::new();
        let mut before = "";
        let mut lines = text.lines().enumerate().peekable();
        while let Some((at, line)) = lines.next() {
            let indented = |line: &str| line.starts_with("    ");
            let fenced = line.starts_with("```");
            // What continues an item of a list is indented, too.
            if !fenced && (!indented(line) || before.starts_with("- ") || before.starts_with("  "))
            {
                if !line.trim().is_empty() {
                    before = line;
                }
                continue;
            }
            let mut block = String::new();
            if fenced {
                for (_, line) in lines.by_ref().take_while(|(_, line)| *line != "```") {
                    block += &format!("{line}\n");
                }
            } else {
                block += &format!("{}\n", line.trim_start());
                while let Some((_, line)) =
                    lines.next_if(|(_, line)| indented(line) || line.is_empty())
                {
                    block += &format!("{}\n", line.get(4..).unwrap_or_default());
                }
            }
            let comment = before
                .strip_prefix("<!-- ")
                .and_then(|rest| rest.strip_suffix(" -->"));
            let fate = comment.and_then(Fate::parse);
            let line = at + 1;
            let fate = fate.with_context(|| {
                format!("docs/{name}:{line}: no comment says what runs the code: {before:?}")
            })?;
            blocks.push(Block {
                line,
                fate,
                text: block.trim_end().to_owned() + "\n",
            });
            before = "";
        }
        let name = name.to_owned();
        Ok(Self { name, blocks })
    }

    /// The block that a lane runs by that name.
    pub fn of_lane(&self, lane: &str, name: &str) -> Result<&str> {
        let wanted = Fate::Lane {
            lane: lane.to_owned(),
            name: name.to_owned(),
        };
        let block = self.blocks.iter().find(|block| block.fate == wanted);
        let block = block.with_context(|| format!("docs/{} has no block {name:?}", self.name))?;
        Ok(&block.text)
    }
}

/// The pages, as `SUMMARY.md` lists them.
pub fn pages() -> Result<Vec<Page>> {
    let path = shell::root().join("docs/SUMMARY.md");
    let summary = fs::read_to_string(path)?;
    let links = summary.split("](").skip(1);
    let names = links.filter_map(|rest| Some(rest.split_once(')')?.0));
    let pages: Vec<Page> = names.map(Page::read).collect::<Result<_>>()?;
    ensure!(pages.len() > 10, "SUMMARY.md lists {} pages", pages.len());
    Ok(pages)
}

/// Has mdBook build the book, and returns where it is.
pub fn build() -> Result<PathBuf> {
    // For the preprocessor.
    setup::packages(&["python3"])?;
    let there = Command::new("mdbook").arg("--version").output();
    let mdbook = match there {
        Ok(_) => PathBuf::from("mdbook"),
        Err(_) => cache::program("mdbook", MDBOOK)?,
    };
    let to = shell::target().join("book");
    let mut build = Command::new(mdbook);
    build.current_dir(shell::root()).arg("build");
    shell::logged("mdbook", build.arg("--dest-dir").arg(&to))?;
    Ok(to)
}

/// Links of the HTML files of a directory that lead nowhere in it.
pub fn dead_links(directory: &Path) -> Result<Vec<String>> {
    let (mut dead, mut count) = (Vec::new(), 0);
    for entry in fs::read_dir(directory)? {
        let page = entry?.path();
        let name = page.file_name().unwrap_or_default().to_string_lossy();
        // Its links are from the root of a server, wherever it is shown.
        if !name.ends_with(".html") || name == "404.html" {
            continue;
        }
        let text = fs::read_to_string(&page)?;
        let attributes = [" href=\"", " src=\""].into_iter();
        let behind = attributes.flat_map(|attribute| text.split(attribute).skip(1));
        let links = behind.filter_map(|rest| Some(rest.split_once('"')?.0));
        for link in links.filter(|link| !link.contains("://")) {
            count += 1;
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = match path {
                "" => page.clone(),
                path => directory.join(path),
            };
            let leads = target.is_file()
                && (anchor.is_empty()
                    || fs::read_to_string(&target)?.contains(&format!("id=\"{anchor}\"")));
            if !leads {
                dead.push(format!("{name}: {link}"));
            }
        }
    }
    ensure!(count > 0, "no links in {}", directory.display());
    Ok(dead)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn blocks_are_found() {
        let text = "Text\n\n<!-- run in vm2, goes on -->\n\n    one\n\n      two\n\n- item\n\n    of it\n\n\
                    text\n<!-- file a -->\n```toml\nx = 1\n```\n<!-- run by lane ulp: x -->\n\n    three\n";
        let page = Page::parse("page.md", text).unwrap();
        let block = |line, fate, text: &str| Block {
            line,
            fate,
            text: text.to_owned(),
        };
        let goes_on = Fate::Run {
            place: Place::Vm(2),
            goes_on: true,
        };
        let file = Fate::File("a".to_owned());
        let lane = Fate::Lane {
            lane: "ulp".to_owned(),
            name: "x".to_owned(),
        };
        let expected = [
            block(5, goes_on, "one\n\n  two\n"),
            block(15, file, "x = 1\n"),
            block(20, lane, "three\n"),
        ];
        assert_eq!(page.blocks, expected);
        assert_eq!(page.of_lane("ulp", "x").unwrap(), "three\n");
        assert!(page.of_lane("ulp", "y").is_err());
        assert!(Page::parse("page.md", "text\n\n    code\n").is_err());
        assert!(Page::parse("page.md", "<!-- run somewhere -->\n\n    code\n").is_err());
    }

    #[test]
    fn dead_links_are_found() {
        let directory = std::env::temp_dir().join(format!("book-{}", std::process::id()));
        fs::create_dir_all(directory.join("folder")).unwrap();
        let page = "<a href=\"b.html\"> <a href=\"b.html#there\"> <a href=\"#here\"> <p id=\"here\">\n\
                    <img src=\"x.png\"> <a href=\"https://example.org/\"> <a href=\"b.html#gone\">\n\
                    <a href=\"../README.html\"> <a href=\"folder\">";
        fs::write(directory.join("a.html"), page).unwrap();
        fs::write(directory.join("b.html"), "<p id=\"there\">").unwrap();
        let mut dead = dead_links(&directory).unwrap();
        dead.sort();
        let expected = ["../README.html", "b.html#gone", "folder", "x.png"];
        assert_eq!(dead, expected.map(|link| format!("a.html: {link}")));
        fs::remove_dir_all(directory).unwrap();
    }

    /// The source of a lane, without its comments.
    fn source(lane: &str) -> String {
        let file = format!("ci/xtask/src/lanes/{}.rs", lane.replace('-', "_"));
        let text = fs::read_to_string(shell::root().join(file)).unwrap();
        let code = text.lines().filter(|line| !line.trim().starts_with("//"));
        code.map(|line| format!("{line}\n")).collect()
    }

    /// Each page is run by the lane that the table of pages says.
    #[test]
    fn each_page_is_run() {
        for (page, lane) in crate::lanes::book::PAGES {
            let source = source(lane);
            let calls = [
                format!("page!({page:?})"),
                format!("run(fixture, {page:?})"),
            ];
            let called = calls.iter().any(|call| source.contains(call));
            assert!(called, "the lane {lane} does not run docs/{page}");
        }
    }

    /// A lane runs what the book says that it runs.
    #[test]
    fn each_command_is_run() {
        let mut names = HashSet::new();
        let mut run = 0;
        for page in pages().unwrap() {
            for block in page.blocks {
                let at = format!("docs/{}:{}", page.name, block.line);
                match block.fate {
                    Fate::Lane { lane, name } => {
                        assert!(
                            source(&lane).contains(&format!("{name:?}")),
                            "{at}: {lane}: {name}"
                        );
                        assert!(names.insert((lane, name)), "{at}: twice");
                        run += 1;
                    }
                    Fate::Run { .. } | Fate::Configuration => {
                        let lanes = crate::lanes::book::PAGES;
                        let known = lanes.iter().any(|(name, _)| *name == page.name);
                        assert!(known, "{at}: no lane runs the page");
                        run += 1;
                    }
                    Fate::NotRun(reason) => assert!(reason.len() > 10, "{at}: {reason}"),
                    Fate::File(_) | Fate::Shown => {}
                }
            }
        }
        assert!(run > 40, "{run} blocks are run");
    }
}
