// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Target `commands`: a guest sends commands. Most begin as ones that the device would carry out,
//! with handles that it gave out before, and then some of their bytes are changed, or they are cut
//! short. In between, the guest scribbles over its memory, where its rings, page tables and
//! doorbells are, and the worker runs.
use arbitrary::{Result, Unstructured};
use virtio_rdma_spec::command::{
    opcode, AllocMr, AllocMw, CommandHeader, CreateContext, CreateCq, CreateQp, CreateSrq, Handle,
    ModifyCq, ModifyQp, ModifySrq, Multicast, PageList, QueryPort, RegMr, ReregMr, ResizeCq,
    ResizeSrq, SetGid, SetPortState, SetStatusPage,
};
use virtio_rdma_spec::facts::QpType;
use virtio_rdma_spec::ring::Cqe;
use virtio_rdma_spec::verbs::{access, qp_type};

use crate::host::{bytes, gid, Guest, Host, FEATURES, PAGE, PAGES, REGIONS};
use crate::neighbour::{Neighbour, NUMBER};
use crate::queues::{attributes, REMOTE};

/// Commands, and other steps, of an input.
const MOST_STEPS: usize = 200;
/// Number of the guest.
const OWN: u8 = 1;
/// Handles of a kind that are remembered.
const REMEMBERED: usize = 12;
/// Pages that tables are written to, from the end of memory. The others are buffers.
const TABLES: usize = 32;

/// Kinds of objects, as indices of [`Handles`].
#[derive(Debug, Clone, Copy)]
enum Kind {
    Context,
    Pd,
    Xrcd,
    Mr,
    Mw,
    Cq,
    Qp,
    Srq,
}

/// Handles that the device gave out. They may have been destroyed since.
#[derive(Debug, Default)]
struct Handles([Vec<u32>; 8]);

impl Handles {
    fn add(&mut self, kind: Kind, handle: u32) {
        let list = &mut self.0[kind as usize];
        if list.len() == REMEMBERED {
            list.remove(0);
        }
        list.push(handle);
    }

    /// One of them, or a number that comes to mind.
    fn pick(&self, kind: Kind, u: &mut Unstructured) -> Result<u32> {
        let list = &self.0[kind as usize];
        Ok(match u.arbitrary::<u8>()? {
            0 => u.arbitrary()?,
            byte => match list.len() {
                0 => u32::from(byte),
                len => list[usize::from(byte) % len],
            },
        })
    }
}

/// What the responses of an opcode give out.
fn made(opcode: u16) -> Option<Kind> {
    Some(match opcode {
        opcode::CREATE_CONTEXT => Kind::Context,
        opcode::CREATE_PD => Kind::Pd,
        opcode::CREATE_XRCD => Kind::Xrcd,
        opcode::REG_MR | opcode::REREG_MR | opcode::ALLOC_MR => Kind::Mr,
        opcode::ALLOC_MW => Kind::Mw,
        opcode::CREATE_CQ => Kind::Cq,
        opcode::CREATE_QP => Kind::Qp,
        opcode::CREATE_SRQ => Kind::Srq,
        _ => return None,
    })
}

struct Scene {
    guest: Guest,
    handles: Handles,
    tables: usize,
}

/// Runs an input.
pub fn run(data: &[u8]) {
    let mut host = Host::new();
    let mut neighbour = Neighbour::new(&host);
    let mut scene = Scene {
        guest: host.guest(OWN, FEATURES | physical(data)),
        handles: Handles::default(),
        tables: 0,
    };
    let mut u = Unstructured::new(data);
    for _ in 0..MOST_STEPS {
        if u.is_empty() || scene.step(&mut u, &mut host).is_err() {
            break;
        }
    }
    scene.guest.start();
    host.rounds(4);
    neighbour.check(&mut host);
    host.remove(scene.guest);
    neighbour.check(&mut host);
    neighbour.leave(&mut host);
}

/// The feature of regions of all memory, in every other input.
fn physical(data: &[u8]) -> u64 {
    let bit = data.last().map_or(0, |byte| u64::from(byte & 1));
    bit << virtio_rdma_spec::config::feature::PHYSICAL_MR
}

impl Scene {
    fn step(&mut self, u: &mut Unstructured, host: &mut Host) -> Result<()> {
        match u.arbitrary::<u8>()? {
            0..=9 => {
                let length = u.int_in_range(0..=255)?;
                let bytes = u.bytes(length.min(u.len()))?;
                let _ = self.guest.send(bytes);
            }
            10..=29 => host.rounds(1),
            30..=49 => self.scribble(u)?,
            50..=53 => {
                let mut present = [true; REGIONS];
                present[u.choose_index(REGIONS)?] = u.arbitrary()?;
                self.guest.set_memory(present);
            }
            54 => {
                self.guest.rnic.stop();
                host.rounds(1);
            }
            55 => self.guest.start(),
            56 => {
                self.guest.rnic.reset();
                self.guest.start();
            }
            57..=60 => host.busy_round(),
            _ => self.command(u)?,
        }
        Ok(())
    }

    /// Writes a word somewhere.
    fn scribble(&mut self, u: &mut Unstructured) -> Result<()> {
        let page = u.choose_index(PAGES)?;
        let word = u.choose_index(PAGE / 8)?;
        let value = match u.arbitrary::<u8>()? {
            0..=63 => u64::from(u.arbitrary::<u8>()?),
            64..=127 => Guest::address(u.choose_index(PAGES)?),
            128..=159 => u64::MAX,
            _ => u.arbitrary()?,
        };
        let word = self.guest.view.u64(page * PAGE + 8 * word);
        word.store(value.to_le(), std::sync::atomic::Ordering::SeqCst);
        Ok(())
    }

    fn command(&mut self, u: &mut Unstructured) -> Result<()> {
        let (_, opcode) = opcode::ALL[u.choose_index(opcode::ALL.len())?];
        let opcode = opcode as u16;
        let mut body = self.body(opcode, u)?;
        // Most commands stay as they are: what comes after them has objects to deal with.
        let changes = u.arbitrary::<u8>()?.saturating_sub(191) / 16;
        for _ in 0..changes {
            change(&mut body, u)?;
        }
        let mut command = crate::host::command(opcode, &body);
        match u.arbitrary::<u8>()? {
            0..=5 => {
                let length = u.choose_index(command.len() + 1)?;
                command.truncate(length);
            }
            6..=9 => {
                let length: u32 = u.arbitrary()?;
                command[4..CommandHeader::SIZE].copy_from_slice(&length.to_le_bytes());
            }
            10..=13 => {
                body.extend_from_slice(&[0; 40]);
                command = crate::host::command(opcode, &body);
            }
            _ => {}
        }
        let Ok(response) = self.guest.send(&command) else {
            return Ok(());
        };
        if let (Some(kind), Some(handle)) = (made(opcode), response.first_chunk()) {
            self.handles.add(kind, u32::from_le_bytes(*handle));
        }
        Ok(())
    }

    /// A list of some pages, most of which are as a driver makes it.
    fn list(&mut self, u: &mut Unstructured) -> Result<PageList> {
        let count = u.int_in_range(1..=4)?;
        self.list_of(count, u)
    }

    fn list_of(&mut self, count: usize, u: &mut Unstructured) -> Result<PageList> {
        let first = u.choose_index(PAGES - TABLES - count)?;
        if count == 1 {
            return Ok(PageList {
                addr: Guest::address(first),
                count: 1,
                page_shift: 12,
                ..PageList::default()
            });
        }
        self.tables = (self.tables + 1) % TABLES;
        let table = PAGES - TABLES + self.tables;
        Ok(self.guest.list_at(table, first, count))
    }

    fn pick(&self, kind: Kind, u: &mut Unstructured) -> Result<u32> {
        self.handles.pick(kind, u)
    }

    /// A body that the device may accept.
    fn body(&mut self, opcode: u16, u: &mut Unstructured) -> Result<Vec<u8>> {
        let handle = |handle| {
            bytes(&Handle {
                handle,
                reserved: 0,
            })
        };
        let about = match opcode {
            opcode::DESTROY_CONTEXT => Some(Kind::Context),
            opcode::DESTROY_PD => Some(Kind::Pd),
            opcode::DESTROY_XRCD => Some(Kind::Xrcd),
            opcode::DEREG_MR => Some(Kind::Mr),
            opcode::DEALLOC_MW => Some(Kind::Mw),
            opcode::DESTROY_CQ => Some(Kind::Cq),
            opcode::QUERY_QP | opcode::DESTROY_QP => Some(Kind::Qp),
            opcode::QUERY_SRQ | opcode::DESTROY_SRQ => Some(Kind::Srq),
            _ => None,
        };
        if let Some(kind) = about {
            return Ok(handle(self.pick(kind, u)?));
        }
        Ok(match opcode {
            opcode::QUERY_PORT | opcode::QUERY_COUNTERS => bytes(&QueryPort {
                port_num: 1,
                ..QueryPort::default()
            }),
            opcode::SET_GID => bytes(&SetGid {
                gid: gid(if u.ratio(1, 8)? { NUMBER } else { OWN }),
                index: u.int_in_range(0..=3)?,
                gid_type: u.int_in_range(0..=1)?,
                port_num: 1,
                vlan: 0xffff,
                mac: self.guest.rnic.config().mac,
                ..SetGid::default()
            }),
            opcode::SET_PORT_STATE => bytes(&SetPortState {
                port_num: 1,
                up: u.int_in_range(0..=1)?,
                ..SetPortState::default()
            }),
            opcode::SET_STATUS_PAGE => bytes(&SetStatusPage {
                addr: Guest::address(u.choose_index(PAGES)?),
            }),
            opcode::CREATE_CONTEXT => bytes(&CreateContext {
                doorbell: self.list_of(Guest::DOORBELL_PAGES, u)?,
                reserved: 0,
            }),
            opcode::ATTACH_MCAST | opcode::DETACH_MCAST => {
                let mut group = [0xff; 16];
                group[15] = u.int_in_range(0..=3)?;
                bytes(&Multicast {
                    gid: group,
                    qpn: self.pick(Kind::Qp, u)?,
                    reserved: 0,
                })
            }
            opcode::CREATE_CQ | opcode::RESIZE_CQ | opcode::MODIFY_CQ => self.of_cq(opcode, u)?,
            opcode::CREATE_QP | opcode::MODIFY_QP => self.of_qp(opcode, u)?,
            opcode::CREATE_SRQ | opcode::MODIFY_SRQ | opcode::RESIZE_SRQ => {
                self.of_srq(opcode, u)?
            }
            opcode::REG_MR | opcode::REREG_MR | opcode::ALLOC_MR | opcode::ALLOC_MW => {
                self.of_memory(opcode, u)?
            }
            _ => Vec::new(),
        })
    }

    fn of_memory(&mut self, opcode: u16, u: &mut Unstructured) -> Result<Vec<u8>> {
        let pd = self.pick(Kind::Pd, u)?;
        let key = u.arbitrary()?;
        let usual = access::LOCAL_WRITE | access::MW_BIND | REMOTE;
        let access = if u.ratio(1, 4)? {
            u.arbitrary()?
        } else {
            usual
        };
        let all_memory = opcode == opcode::REG_MR && access & access::PHYSICAL != 0;
        let pages = if all_memory {
            PageList::default()
        } else {
            self.list(u)?
        };
        let length = u64::from(pages.count) * PAGE as u64;
        let offset = if u.ratio(1, 8)? { 100 } else { 0 };
        let length = length.saturating_sub(offset);
        let iova = if all_memory { 0 } else { 0x7000_0000 + offset };
        Ok(match opcode {
            opcode::REG_MR => bytes(&RegMr {
                pd,
                access,
                iova,
                length,
                offset,
                pages,
                key,
                ..RegMr::default()
            }),
            opcode::REREG_MR => bytes(&ReregMr {
                lkey: self.pick(Kind::Mr, u)?,
                flags: u.int_in_range(1..=7)?,
                pd,
                access,
                iova,
                length,
                offset,
                pages,
                key,
                ..ReregMr::default()
            }),
            opcode::ALLOC_MR => bytes(&AllocMr {
                pd,
                max_pages: u.int_in_range(1..=600)?,
                flags: u.int_in_range(0..=1)?,
                key,
                ..AllocMr::default()
            }),
            _ => bytes(&AllocMw {
                pd,
                mw_type: u.int_in_range(1..=2)?,
                key,
                ..AllocMw::default()
            }),
        })
    }

    fn of_cq(&mut self, opcode: u16, u: &mut Unstructured) -> Result<Vec<u8>> {
        let buffer = self.list(u)?;
        let entries = 1 << u.int_in_range(0..=7)?;
        let stride = (Cqe::SIZE as u16) << u.int_in_range(0..=1)?;
        Ok(match opcode {
            opcode::CREATE_CQ => bytes(&CreateCq {
                entries,
                comp_vector: u.int_in_range(0..=3)?,
                stride,
                ring_offset: 128,
                buffer,
                ..CreateCq::default()
            }),
            opcode::RESIZE_CQ => bytes(&ResizeCq {
                cqn: self.pick(Kind::Cq, u)?,
                entries,
                ring_offset: 128,
                buffer,
                ..ResizeCq::default()
            }),
            _ => bytes(&ModifyCq {
                cqn: self.pick(Kind::Cq, u)?,
                count: u.arbitrary()?,
                period: u.arbitrary()?,
                reserved: 0,
            }),
        })
    }

    fn of_qp(&mut self, opcode: u16, u: &mut Unstructured) -> Result<Vec<u8>> {
        const TYPES: [u8; 7] = [
            qp_type::RC,
            qp_type::UD,
            qp_type::SRD,
            qp_type::UC,
            qp_type::GSI,
            qp_type::XRC_INI,
            qp_type::XRC_TGT,
        ];
        let qp_type = *u.choose(&TYPES)?;
        if opcode == opcode::MODIFY_QP {
            let to = gid(if u.ratio(1, 8)? { NUMBER } else { OWN });
            let (attr, attr_mask) =
                attributes(qp_type, u.int_in_range(0..=6)?, to, self.pick(Kind::Qp, u)?);
            return Ok(bytes(&ModifyQp {
                qpn: self.pick(Kind::Qp, u)?,
                attr_mask,
                attr,
            }));
        }
        let (sends, receives) =
            QpType::of(qp_type).map_or((true, true), |kind| (kind.sends, kind.receives));
        let srq = if receives && u.ratio(1, 4)? {
            self.pick(Kind::Srq, u)?
        } else {
            0
        };
        let entries = 1u32 << u.int_in_range(0..=4)?;
        Ok(bytes(&CreateQp {
            pd: self.pick(Kind::Pd, u)?,
            context: self.pick(Kind::Context, u)?,
            send_cq: self.pick(Kind::Cq, u)?,
            recv_cq: self.pick(Kind::Cq, u)?,
            qp_type,
            flags: u.int_in_range(0..=1)?,
            sq_entries: if sends { entries } else { 0 },
            sq_stride: 128,
            sq_offset: 128,
            rq_entries: if receives && srq == 0 { entries } else { 0 },
            rq_stride: 64,
            rq_offset: 128 + 16 * 128,
            max_send_sge: u.int_in_range(0..=4)?,
            max_recv_sge: u.int_in_range(0..=3)?,
            max_inline: u.int_in_range(0..=64)?,
            srq,
            buffer: self.list(u)?,
            xrcd: if qp_type == qp_type::XRC_TGT {
                self.pick(Kind::Xrcd, u)?
            } else {
                0
            },
            ..CreateQp::default()
        }))
    }

    fn of_srq(&mut self, opcode: u16, u: &mut Unstructured) -> Result<Vec<u8>> {
        let entries = 1u32 << u.int_in_range(0..=5)?;
        let limit = u.int_in_range(0..=4)?;
        Ok(match opcode {
            opcode::CREATE_SRQ => {
                let srq_type = u.int_in_range(0..=1)?;
                let (xrcd, cq) = match srq_type {
                    0 => (0, 0),
                    _ => (self.pick(Kind::Xrcd, u)?, self.pick(Kind::Cq, u)?),
                };
                bytes(&CreateSrq {
                    pd: self.pick(Kind::Pd, u)?,
                    context: self.pick(Kind::Context, u)?,
                    entries,
                    stride: 64,
                    ring_offset: 128,
                    max_sge: u.int_in_range(0..=3)?,
                    srq_type,
                    xrcd,
                    cq,
                    limit,
                    buffer: self.list(u)?,
                    ..CreateSrq::default()
                })
            }
            opcode::RESIZE_SRQ => bytes(&ResizeSrq {
                srqn: self.pick(Kind::Srq, u)?,
                flags: u.int_in_range(0..=1)?,
                entries,
                ring_offset: 128,
                limit,
                buffer: self.list(u)?,
                ..ResizeSrq::default()
            }),
            _ => bytes(&ModifySrq {
                srqn: self.pick(Kind::Srq, u)?,
                limit,
                reserved: 0,
            }),
        })
    }
}

/// Changes some bytes.
pub(crate) fn change(bytes: &mut [u8], u: &mut Unstructured) -> Result<()> {
    const NUMBERS: [u64; 10] = [
        0,
        1,
        0xfff,
        0x1000,
        0x8000_0000,
        0xffff_ffff,
        0xff_ffff,
        1 << 40,
        i64::MAX as u64,
        u64::MAX,
    ];
    if bytes.is_empty() {
        return Ok(());
    }
    let at = u.choose_index(bytes.len())?;
    let size = 1 << u.int_in_range(0..=3)?;
    let at = at - at % size;
    let value = if u.ratio(1, 2)? {
        *u.choose(&NUMBERS)?
    } else {
        u.arbitrary::<u64>()?
    };
    let value = value.to_le_bytes();
    for (byte, value) in bytes[at..].iter_mut().zip(&value[..size]) {
        *byte = *value;
    }
    Ok(())
}
