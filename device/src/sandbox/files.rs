// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Files and networks, by Landlock: the process opens no file, binds and connects nothing, and
//! sends no signals to others. In the directories of its sockets it may remove files. What it has
//! open, and what it is sent by way of a socket, it may go on using.
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use landlock::{
    Access, AccessFs, AccessNet, PathBeneath, PathFd, RestrictionStatus, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope, ABI,
};

/// What this is tested with (Linux 6.15 and later). Of what older kernels lack there is as much as
/// they have.
const TESTED: ABI = ABI::V7;

/// Rules that allow to remove files in `directories`, and TCP if there are `connections`: to which
/// ports, drivers say. Nothing else.
pub(super) fn rules(
    directories: &[PathBuf],
    connections: bool,
) -> Result<RulesetCreated, RulesetError> {
    let mut rules = Ruleset::default().handle_access(AccessFs::from_all(TESTED))?;
    if !connections {
        rules = rules.handle_access(AccessNet::from_all(TESTED))?;
    }
    let mut rules = rules.scope(Scope::from_all(TESTED))?.create()?;
    let directories: BTreeSet<&Path> = directories.iter().map(PathBuf::as_path).collect();
    for directory in directories {
        match PathFd::new(directory) {
            Ok(fd) => rules = rules.add_rule(PathBeneath::new(fd, AccessFs::RemoveFile))?,
            // A socket is there, so it is merely not ours to read.
            Err(error) => log::debug!("{}: {error}", directory.display()),
        }
    }
    Ok(rules)
}

/// Says what the kernel lacks.
pub(super) fn tell(status: &RestrictionStatus) {
    match status.ruleset {
        RulesetStatus::FullyEnforced => {}
        RulesetStatus::PartiallyEnforced => {
            log::info!("this kernel has a part of the rules for files and networks (Landlock)");
        }
        _ => log::warn!("this kernel has no Landlock: files are restricted by system calls only"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::io::{ErrorKind, Read};
    use vmm_sys_util::tempdir::TempDir;

    #[test]
    fn files_are_removed_and_nothing_else() {
        let directories = [(); 2].map(|()| TempDir::new().unwrap());
        let [ours, other] = directories.each_ref().map(TempDir::as_path);
        for directory in [ours, other] {
            fs::write(directory.join("file"), "text").unwrap();
        }
        let mut open = File::open(other.join("file")).unwrap();
        let directories = [ours.to_owned(), ours.to_owned(), "/no/such".into()];
        let rules = rules(&directories, false).unwrap();
        std::thread::scope(|scope| {
            let confined = scope.spawn(|| {
                if rules.restrict_self().unwrap().ruleset == RulesetStatus::NotEnforced {
                    return;
                }
                let denied = |result: std::io::Result<()>| {
                    assert_eq!(result.unwrap_err().kind(), ErrorKind::PermissionDenied);
                };
                denied(fs::read(ours.join("file")).map(drop));
                denied(fs::write(ours.join("new"), "").map(drop));
                denied(fs::read("/etc/passwd").map(drop));
                denied(fs::remove_file(other.join("file")));
                fs::remove_file(ours.join("file")).unwrap();
                let mut text = String::new();
                open.read_to_string(&mut text).unwrap();
                assert_eq!(text, "text");
            });
            confined.join().unwrap();
        });
    }
}
