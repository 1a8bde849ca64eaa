// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The text (`virtio-rdma.md`) and the crate are one specification in two forms. These tests prove
//! that they agree in both directions: every structure and constant of one is in the other, with
//! the same names, places and values.
use std::collections::{BTreeMap, BTreeSet};

use virtio_rdma_spec::facts::{Opcode, QpType, OPCODES, QP_TYPES};
use virtio_rdma_spec::verbs::{qp_type, wr_opcode};
use virtio_rdma_spec::{command, config, doorbell, event, iwarp, ring, verbs};

const TEXT: &str = include_str!("../virtio-rdma.md");

/// Sources of the crate, to see that this test forgets none of their constants.
const SOURCES: &[(&str, &str)] = &[
    ("device", include_str!("../src/lib.rs")),
    ("command", include_str!("../src/command.rs")),
    ("config", include_str!("../src/config.rs")),
    ("doorbell", include_str!("../src/doorbell.rs")),
    ("event", include_str!("../src/event.rs")),
    ("ring", include_str!("../src/ring.rs")),
    ("verbs", include_str!("../src/verbs.rs")),
];

/// A table with the name above it.
#[derive(Debug)]
struct Table {
    name: String,
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

fn cells(line: &str) -> Option<Vec<String>> {
    let inner = line.trim().strip_prefix('|')?.strip_suffix('|')?;
    Some(inner.split('|').map(|c| c.trim().to_owned()).collect())
}

/// All tables of the text. The name is the bold paragraph right above, or empty.
fn tables() -> Vec<Table> {
    let mut tables = Vec::new();
    let mut above = String::new();
    let mut lines = TEXT.lines().peekable();
    while let Some(line) = lines.next() {
        if let Some(header) = cells(line) {
            let rule = lines
                .next()
                .and_then(cells)
                .expect("a table has a rule below its header");
            assert!(
                rule.iter().all(|c| c == "---"),
                "rule of table {above:?}: {rule:?}"
            );
            let mut rows = Vec::new();
            while let Some(row) = lines.peek().and_then(|l| cells(l)) {
                assert_eq!(
                    row.len(),
                    header.len(),
                    "columns in table {above:?}: {row:?}"
                );
                rows.push(row);
                lines.next();
            }
            tables.push(Table {
                name: std::mem::take(&mut above),
                header,
                rows,
            });
        } else if !line.trim().is_empty() {
            let name = line.strip_prefix("**").and_then(|l| l.strip_suffix("**"));
            above = name.unwrap_or_default().to_owned();
        }
    }
    tables
}

fn number(text: &str) -> u64 {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.unwrap_or_else(|e| panic!("{text:?}: {e}"))
}

/// What names of feature bits begin with in the text.
const FEATURE: &str = "VIRTIO_RDMA_F_";

/// `name`, which must begin with `prefix`, without it.
fn without<'a>(prefix: &str, name: &'a str) -> &'a str {
    let rest = name.strip_prefix(prefix);
    rest.unwrap_or_else(|| panic!("{name} does not begin with {prefix}"))
}

/// `"name (N unit)"` taken apart.
fn sized<'a>(name: &'a str, unit: &str) -> Option<(&'a str, u64)> {
    let (name, size) = name.split_once(" (")?;
    let size = size.strip_suffix(')')?.strip_suffix(unit)?.trim_end();
    Some((name, number(size)))
}

/// Size and fields (offset, size, name) of a structure.
type Structure = (u64, Vec<(u64, u64, String)>);
/// Width in bits (0 where it is not said) and constants (value, name).
type Group = (u64, Vec<(u64, String)>);

fn structures_of_text() -> BTreeMap<String, Structure> {
    let mut all = BTreeMap::new();
    for t in tables()
        .iter()
        .filter(|t| t.header.first().is_some_and(|h| h == "offset"))
    {
        assert_eq!(
            t.header,
            ["offset", "size", "field", "meaning"],
            "table {:?}",
            t.name
        );
        let (name, size) =
            sized(&t.name, "bytes").unwrap_or_else(|| panic!("a layout without a name: {t:?}"));
        let fields = t
            .rows
            .iter()
            .map(|r| (number(&r[0]), number(&r[1]), r[2].clone()))
            .collect();
        assert!(
            t.rows.iter().all(|r| !r[3].is_empty()),
            "a field of {name} without meaning"
        );
        assert!(
            all.insert(name.to_owned(), (size, fields)).is_none(),
            "{name} is there twice"
        );
    }
    all
}

fn groups_of_text() -> BTreeMap<String, Group> {
    let mut all = BTreeMap::new();
    for t in tables()
        .iter()
        .filter(|t| t.header.first().is_some_and(|h| h == "value"))
    {
        assert_eq!(t.header, ["value", "name", "meaning"], "table {:?}", t.name);
        let (name, width) = match t.name.strip_suffix(" constants") {
            Some(_) => (t.name.as_str(), 0),
            None => {
                sized(&t.name, "bits").unwrap_or_else(|| panic!("constants without a name: {t:?}"))
            }
        };
        let prefix = if name == "feature" { FEATURE } else { "" };
        let constants = t
            .rows
            .iter()
            .map(|r| (number(&r[0]), without(prefix, &r[1]).to_owned()))
            .collect();
        assert!(
            t.rows.iter().all(|r| !r[2].is_empty()),
            "a constant of {name} without meaning"
        );
        assert!(
            all.insert(name.to_owned(), (width, constants)).is_none(),
            "{name} is there twice"
        );
    }
    all
}

fn structures_of_crate() -> BTreeMap<String, Structure> {
    let modules = [
        config::LAYOUTS,
        ring::LAYOUTS,
        event::LAYOUTS,
        command::LAYOUTS,
        iwarp::LAYOUTS,
    ];
    let mut all = BTreeMap::new();
    for (name, size, fields) in modules.into_iter().flatten() {
        let fields = fields
            .iter()
            .map(|f| (f.offset as u64, f.size as u64, f.name.to_owned()))
            .collect();
        assert!(
            all.insert((*name).to_owned(), (*size as u64, fields))
                .is_none(),
            "{name} is there twice"
        );
    }
    all
}

/// Bits of the type that a group's values have, by the type of its `name` function.
fn width<T>(_: fn(T) -> Option<&'static str>) -> u64 {
    8 * std::mem::size_of::<T>() as u64
}

/// The group of a module made by `constants!`.
macro_rules! groups {
    ($($($path:ident)::+),* $(,)?) => {[
        $({
            let path = stringify!($($path)::+);
            let name = path.rsplit(':').next().unwrap_or(path).trim();
            let constants = $($path)::+::ALL.iter().map(|(n, v)| (*v, (*n).to_owned())).collect();
            (name.to_owned(), (width($($path)::+::name), constants))
        },)*
    ]};
}

/// The group of single constants of a module.
macro_rules! plain {
    ($name:literal: $($path:path),* $(,)?) => {
        ($name.to_owned() + " constants", (0, vec![$({
            let path = stringify!($path);
            let name = path.rsplit(':').next().unwrap_or(path).trim();
            ($path as u64, name.to_owned())
        },)*]))
    };
}

fn groups_of_crate() -> BTreeMap<String, Group> {
    let mut all: BTreeMap<String, Group> = BTreeMap::from(groups![
        command::alloc_mr_flag,
        command::create_qp_flag,
        command::gid_type,
        command::mw_type,
        command::opcode,
        command::rereg_flag,
        command::resize_srq_flag,
        command::srq_type,
        command::status,
        config::feature,
        doorbell::worker_status,
        event::event_type,
        iwarp::iw_event,
        verbs::access,
        verbs::flush_level,
        verbs::flush_type,
        verbs::mtu,
        verbs::qp_attr,
        verbs::qp_state,
        verbs::qp_type,
        verbs::send_flag,
        verbs::vendor_err,
        verbs::wc_flag,
        verbs::wc_opcode,
        verbs::wc_status,
        verbs::wr_opcode,
    ]);
    all.extend([
        plain!("device": virtio_rdma_spec::DEVICE_ID, virtio_rdma_spec::PAGE_SIZE),
        plain!("config": config::CONTROL_QUEUE, config::EVENT_QUEUE, config::FIRST_COMPLETION_QUEUE, config::MAX_QUEUES),
        plain!("ring":
            ring::PHASE,
            ring::SEND_DATA_OFFSET,
            ring::UD_DATA_OFFSET,
            ring::SRD_RANGE_OFFSET,
            ring::SRD_DATA_OFFSET,
            ring::BIND_MW_OFFSET,
            ring::FAST_REG_OFFSET,
            ring::MASKED_OPERANDS_OFFSET,
            ring::RECV_DATA_OFFSET,
            ring::WQE_PHASE_WORD,
            ring::CQE_PHASE_WORD,
            ring::CQ_ARM_OFFSET,
            ring::MIN_SEND_STRIDE,
            ring::MIN_RECV_STRIDE,
            ring::MAX_WQE_STRIDE,
            ring::MAX_WQ_ENTRIES,
            ring::MAX_CQ_ENTRIES,
            ring::MAX_SGE,
            ring::MAX_INLINE,
            ring::ARM_NEXT,
            ring::ARM_SOLICITED,
            ring::ARM_SEQUENCE,
        ),
        plain!("doorbell":
            doorbell::SLOTS,
            doorbell::DIRECT_SLOTS,
            doorbell::DIRECT_SHIFT,
            doorbell::ROOT_OFFSET,
            doorbell::SUMMARY_OFFSET,
            doorbell::LEAF_OFFSET,
            doorbell::BLOCK_SIZE,
            doorbell::BLOCK_PAGES,
            doorbell::STATUS_STRIDE,
        ),
        plain!("verbs": verbs::MASK_24),
        plain!("iwarp": iwarp::MAX_PRIVATE_DATA),
    ]);
    all
}

fn assert_same<T: PartialEq + std::fmt::Debug>(
    what: &str,
    text: &BTreeMap<String, T>,
    code: &BTreeMap<String, T>,
) {
    for (name, t) in text {
        let c = code
            .get(name)
            .unwrap_or_else(|| panic!("{what} {name} is in the text only"));
        assert_eq!(t, c, "{what} {name}: text (left) and crate (right) differ");
    }
    for name in code.keys() {
        assert!(
            text.contains_key(name),
            "{what} {name} is in the crate only"
        );
    }
}

#[test]
fn structures_agree() {
    let text = structures_of_text();
    assert!(!text.is_empty());
    assert_same("structure", &text, &structures_of_crate());
}

/// Fields of a structure as C declares them: type, name and number of elements.
type Declaration = Vec<String>;

/// The declarations in C, by the names of the structures, and the name of the table below each.
fn declarations_of_text() -> BTreeMap<String, (Declaration, String)> {
    let mut all = BTreeMap::new();
    let mut lines = TEXT.lines().peekable();
    while let Some(line) = lines.next() {
        if line != "```c" {
            continue;
        }
        let first = lines.next().and_then(|l| l.strip_suffix(" {"));
        let name = first.and_then(|l| l.strip_prefix("struct "));
        let name = name.unwrap_or_else(|| panic!("no structure after {line:?}"));
        let mut fields = Vec::new();
        for line in lines.by_ref().take_while(|line| *line != "};") {
            let field = line
                .strip_prefix("        ")
                .and_then(|l| l.strip_suffix(';'));
            fields.push(
                field
                    .unwrap_or_else(|| panic!("{name}: {line:?}"))
                    .to_owned(),
            );
        }
        assert_eq!(lines.next(), Some("```"), "{name}");
        let below = lines.by_ref().find(|line| !line.is_empty());
        let below = below.and_then(|l| l.strip_prefix("**")?.split(' ').next());
        let below = below.unwrap_or_else(|| panic!("no table below {name}"));
        let before = all.insert(name.to_owned(), (fields, below.to_owned()));
        assert!(before.is_none(), "{name} is there twice");
    }
    all
}

/// The name in C of a structure of the crate.
fn c_name(name: &str) -> String {
    let mut snake = "virtio_rdma".to_owned();
    for c in name.chars() {
        if c.is_ascii_uppercase() {
            snake.push('_');
        }
        snake.push(c.to_ascii_lowercase());
    }
    snake
}

/// A field of the crate as C declares it.
fn c_field(of: &str, name: &str) -> String {
    let array = of.strip_prefix("[u8; ").and_then(|n| n.strip_suffix(']'));
    match (of, array) {
        (_, Some(count)) => format!("u8 {name}[{count}]"),
        ("u8", _) => format!("u8 {name}"),
        ("u16" | "u32" | "u64", _) => format!("le{} {name}", &of[1..]),
        _ => format!("struct {} {name}", c_name(of)),
    }
}

#[test]
fn declarations_agree() {
    let mut text = declarations_of_text();
    let modules = [
        config::LAYOUTS,
        ring::LAYOUTS,
        event::LAYOUTS,
        command::LAYOUTS,
        iwarp::LAYOUTS,
    ];
    for (name, _, fields) in modules.into_iter().flatten() {
        let fields: Vec<_> = fields.iter().map(|f| c_field(f.of, f.name)).collect();
        let said = text.remove(&c_name(name));
        assert_eq!(said, Some((fields, (*name).to_owned())), "{name}");
    }
    assert!(text.is_empty(), "of no structure of the crate: {text:?}");
}

#[test]
fn constants_agree() {
    let text = groups_of_text();
    assert!(!text.is_empty());
    assert_same("group", &text, &groups_of_crate());
}

/// Rust cannot list the constants of a module, so the lists above are compared with the sources.
#[test]
fn no_constant_of_the_crate_is_forgotten() {
    let groups = groups_of_crate();
    for (module, source) in SOURCES {
        let single: BTreeSet<String> = groups
            .get(&format!("{module} constants"))
            .map(|(_, c)| c.iter().map(|(_, name)| name.clone()).collect())
            .unwrap_or_default();
        let mut found = BTreeSet::new();
        for line in source.lines() {
            let constant = line
                .strip_prefix("pub const ")
                .and_then(|l| l.split_once(": "));
            if let Some((name, _)) = constant.filter(|(name, _)| !name.starts_with("fn ")) {
                found.insert(name.to_owned());
            }
            if let Some((name, _)) = line
                .strip_prefix("    pub mod ")
                .and_then(|l| l.split_once(": "))
            {
                assert!(
                    groups.contains_key(name),
                    "{module}::{name} is not compared"
                );
            }
        }
        assert_eq!(
            single, found,
            "single constants of {module}: compared (left), in the source (right)"
        );
    }
}

/// The text with each paragraph and each item of a list on one line.
fn unwrapped() -> String {
    let mut text = String::new();
    for line in TEXT.lines() {
        let starts = line.is_empty() || line.starts_with(['|', '#', '-']);
        text.push_str(if starts { "\n" } else { " " });
        text.push_str(line.trim_start());
    }
    text
}

#[test]
fn requirements_are_unique_and_well_formed() {
    let text = unwrapped();
    let mut defined = BTreeSet::new();
    for line in text.lines() {
        let Some((id, text)) = line
            .strip_prefix("- **[")
            .and_then(|l| l.split_once("]** "))
        else {
            continue;
        };
        assert!(defined.insert(id), "{id} is there twice");
        let parts: Vec<&str> = id.split('-').collect();
        let [side, area, n] = parts[..] else {
            panic!("{id} is not SIDE-AREA-NUMBER")
        };
        assert!(area.chars().all(|c| c.is_ascii_uppercase()), "{id}");
        assert!(
            n.len() == 3 && n.chars().all(|c| c.is_ascii_digit()),
            "{id}"
        );
        let subject = match side {
            "D" => "The device ",
            "G" => "The driver ",
            _ => panic!("{id} is neither of device nor of driver"),
        };
        assert!(
            text.starts_with(subject),
            "{id} does not begin with {subject:?}"
        );
        let strong = ["MUST", "SHOULD", "MAY"];
        assert!(
            strong.iter().any(|w| text.contains(w)),
            "{id} requires nothing"
        );
    }
    assert!(defined.len() > 100);
    for (at, _) in TEXT.match_indices("**[") {
        let id = TEXT[at + 3..].split(']').next().unwrap_or_default();
        assert!(defined.contains(id), "{id} is referred to but not defined");
    }
}

/// Numbers that the prose repeats.
#[test]
fn numbers_in_the_prose_agree() {
    let text = unwrapped();
    assert_eq!(doorbell::bit(doorbell::SLOTS), None);
    for (what, value) in [
        ("`max_qp_wr` ≤ ", u64::from(ring::MAX_WQ_ENTRIES)),
        ("`max_cqe` ≤ ", u64::from(ring::MAX_CQ_ENTRIES)),
        ("`max_sge` ≤ ", u64::from(ring::MAX_SGE)),
        ("`max_inline` ≤ ", u64::from(ring::MAX_INLINE)),
        ("C + D ≤ ", u64::from(config::MAX_QUEUES)),
        ("The device id is ", u64::from(virtio_rdma_spec::DEVICE_ID)),
    ] {
        let (_, after) = text
            .split_once(what)
            .unwrap_or_else(|| panic!("{what:?} is not in the text"));
        let digits: String = after.chars().take_while(char::is_ascii_digit).collect();
        assert_eq!(number(&digits), value, "{what}");
    }
}

/// The table with this header; there is one.
fn table_of(header: &[&str]) -> Table {
    let mut found = tables().into_iter().filter(|t| t.header == header);
    let table = found.next();
    assert!(found.next().is_none(), "two tables of {header:?}");
    table.unwrap_or_else(|| panic!("no table of {header:?}"))
}

/// The names in a cell.
fn names(cell: &str) -> BTreeSet<&str> {
    cell.split(", ").filter(|name| !name.is_empty()).collect()
}

#[test]
fn types_have_the_opcodes_that_the_text_says() {
    let mut said = BTreeMap::new();
    for row in &table_of(&["type", "opcodes"]).rows {
        for of in names(&row[0]) {
            said.insert(of.to_owned(), row[1].clone());
        }
    }
    for of in QP_TYPES {
        let name = qp_type::name(of.qp_type).unwrap();
        let text = said.remove(name).unwrap_or_default();
        for opcode in OPCODES {
            let opcode_name = wr_opcode::name(opcode.opcode).unwrap();
            let expected = text == "all" || names(&text).contains(opcode_name);
            assert_eq!(
                opcode.is_for(of.qp_type),
                expected,
                "{opcode_name} of {name}"
            );
        }
    }
    assert!(said.is_empty(), "types that there are not: {said:?}");
}

#[test]
fn opcodes_and_types_need_the_features_that_the_text_says() {
    let header = [
        "feature",
        "commands",
        "queue pair types",
        "work requests",
        "else",
    ];
    let table = table_of(&header);
    let feature = |row: &[String]| {
        let mut all = config::feature::ALL.iter();
        let of = all.find(|(name, _)| *name == without(FEATURE, &row[0]));
        of.unwrap_or_else(|| panic!("no feature {}", row[0])).1 as u32
    };
    let mut opcodes = BTreeMap::<&str, BTreeSet<u32>>::new();
    let mut types = BTreeMap::new();
    for row in &table.rows {
        for name in names(&row[3]) {
            opcodes.entry(name).or_default().insert(feature(row));
        }
        for name in names(&row[2]) {
            types.insert(name, feature(row));
        }
    }
    for (name, value) in wr_opcode::ALL {
        let of = Opcode::of(*value as u8).unwrap_or_else(|| panic!("no facts of {name}"));
        let facts: BTreeSet<_> = of.features.iter().copied().collect();
        assert_eq!(facts, opcodes.remove(name).unwrap_or_default(), "{name}");
    }
    for (name, value) in qp_type::ALL {
        let of = QpType::of(*value as u8).unwrap();
        let said = types.remove(name).unwrap_or(config::feature::RC);
        assert_eq!(of.feature, said, "{name}");
    }
    assert!(opcodes.is_empty() && types.is_empty());
}

/// The table of what send work requests do has each of them.
#[test]
fn every_opcode_has_a_meaning() {
    let table = table_of(&["opcode", "memory of the requester", "at the responder"]);
    let told: BTreeSet<&str> = table.rows.iter().flat_map(|row| names(&row[0])).collect();
    for (name, _) in wr_opcode::ALL {
        assert!(
            told.contains(name),
            "what {name} needs and does is not said"
        );
    }
}
