// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The tables of the specification about changes of state, compared with the state machines of the
//! device.
use std::collections::BTreeMap;

use vhost_device_rdma::verbs::state::attributes;
use virtio_rdma_spec::verbs::{qp_attr, qp_state, qp_type};

const TEXT: &str = include_str!("../../spec/virtio-rdma.md");

/// Value of a name in a group of constants.
fn value(all: &[(&str, u64)], name: &str) -> u64 {
    let found = all.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("{name} is unknown")).1
}

fn mask(cell: &str) -> u32 {
    let names = cell
        .split(',')
        .map(str::trim)
        .filter(|name| !name.is_empty());
    names.fold(0, |mask, name| mask | value(qp_attr::ALL, name) as u32)
}

/// Changes from one state to another, with required and optional attributes.
type Changes = BTreeMap<(u8, u8), (u32, u32)>;

/// The table of a type of queue pair.
fn changes(kind: &str) -> Changes {
    let (_, after) = TEXT
        .split_once(&format!("\n**changes of {kind}**\n\n"))
        .unwrap_or_else(|| panic!("no table of {kind}"));
    let mut changes = Changes::new();
    for row in after
        .lines()
        .skip(2)
        .take_while(|line| line.starts_with('|'))
    {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let [_, from, to, required, optional, _] = cells[..] else {
            panic!("{row:?} has not four columns")
        };
        let to = value(qp_state::ALL, to) as u8;
        for from in from.split(',') {
            let from = value(qp_state::ALL, from.trim()) as u8;
            let twice = changes.insert((from, to), (mask(required), mask(optional)));
            assert!(twice.is_none(), "{kind}: {row:?} is there twice");
        }
    }
    changes
}

// D-QPS-001.
#[test]
fn every_type_has_the_changes_of_its_table() {
    for (name, kind) in qp_type::ALL {
        let table = changes(name);
        for (from_name, from) in qp_state::ALL {
            for (to_name, to) in qp_state::ALL {
                let (from, to) = (*from as u8, *to as u8);
                assert_eq!(
                    attributes(*kind as u8, from, to),
                    table.get(&(from, to)).copied(),
                    "{name}: {from_name} to {to_name}: device (left), text (right)"
                );
            }
        }
    }
}
