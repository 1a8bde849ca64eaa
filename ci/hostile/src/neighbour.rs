// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a hostile VM does to others of its process.

use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use vhost_device_rdma_bare::core::command::{DeregMr, DestroyQp};
use vhost_device_rdma_bare::spec::command::status;
use vhost_device_rdma_bare::spec::verbs::{mtu, qp_state, qp_type, wc_status};
use vhost_device_rdma_bare::{Address, Connection, Cq, Error, Pd, QpOptions};

use crate::guest::small;
use crate::objects::destroy;
use crate::traffic::{impatient, Pair, Side, SideOptions, ACCESS};
use crate::{completed, refused, Attack, Attacker};

/// All attacks of this file.
pub const ALL: &[Attack] = &[
    Attack {
        name: "foreign_handles",
        round: foreign_handles,
    },
    Attack {
        name: "claimed_gids",
        round: claimed_gids,
    },
    Attack {
        name: "connections_of_others",
        round: connections_of_others,
    },
    Attack {
        name: "guesses",
        round: guesses,
    },
    Attack {
        name: "datagrams_to_everybody",
        round: datagrams_to_everybody,
    },
    Attack {
        name: "receiver_not_ready",
        round: receiver_not_ready,
    },
    Attack {
        name: "flood",
        round: flood,
    },
];

/// The victims' numbers and keys, in the attacker's own commands and work requests.
fn foreign_handles(attacker: &mut Attacker) -> Result<()> {
    let vm = attacker.vm()?;
    let gone = [status::ENOENT];
    for victim in &attacker.victims {
        for qpn in &victim.qpns {
            refused("a foreign QP", destroy::<DestroyQp>(&vm, *qpn), &gone)?;
        }
        for (rkey, iova) in &victim.regions {
            refused("a foreign key", destroy::<DeregMr>(&vm, *rkey), &gone)?;
            let pair = Pair::connect(&vm, &vm, &small(), impatient)?;
            let a = &pair.a;
            a.qp.write(1, &[a.mr.sge(0, 64)], *iova, *rkey)?;
            let statuses = [wc_status::REM_ACCESS_ERR];
            completed("a foreign rkey", a.sent()?, &statuses)?;
        }
    }
    Ok(())
}

/// Finding 4: the GIDs of others.
fn claimed_gids(attacker: &mut Attacker) -> Result<()> {
    let vm = attacker.vm()?;
    for gid in attacker.victims.iter().flat_map(|victim| &victim.gids) {
        for index in [0, 1] {
            let result = vm.set_gid(index, *gid);
            refused("a GID of another", result, &[status::EPERM, status::EBUSY])?;
        }
    }
    Ok(())
}

/// Finding 3: work requests to the queue pairs of others, with their true numbers and keys.
fn connections_of_others(attacker: &mut Attacker) -> Result<()> {
    let vm = attacker.vm()?;
    for victim in &attacker.victims {
        for gid in &victim.gids {
            for qpn in &victim.qpns {
                for of in [qp_type::RC, qp_type::UC] {
                    let options = SideOptions {
                        qp: QpOptions {
                            qp_type: of,
                            ..small().qp
                        },
                        ..small()
                    };
                    let side = Side::new(&vm, &options)?;
                    let mut to = to(of, *qpn, *gid);
                    impatient(&mut to);
                    side.qp.connect(&to)?;
                    let (rkey, iova) = victim.regions.first().copied().unwrap_or((1, 0));
                    side.qp.write(1, &[side.mr.sge(0, 64)], iova, rkey)?;
                    // A sender of UC does not learn that nobody took it.
                    let expected = match of {
                        qp_type::UC => wc_status::SUCCESS,
                        _ => wc_status::RETRY_EXC_ERR,
                    };
                    completed("a write to others", side.sent()?, &[expected])?;
                }
            }
        }
    }
    Ok(())
}

/// A connection to a queue pair that is not the attacker's.
fn to(of: u8, qpn: u32, gid: [u8; 16]) -> Connection {
    Connection {
        qp_type: of,
        qkey: 0,
        dest_qp_num: qpn,
        dgid: gid,
        dmac: [0; 6],
        path_mtu: mtu::MTU_4096,
        access: ACCESS,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 7,
        min_rnr_timer: 12,
        max_rd_atomic: 16,
    }
}

/// Finding 3: numbers and keys that are guessed.
fn guesses(attacker: &mut Attacker) -> Result<()> {
    let vm = attacker.vm()?;
    let side = Side::new(&vm, &small())?;
    let gids: Vec<[u8; 16]> = attacker
        .victims
        .iter()
        .flat_map(|victim| victim.gids.clone())
        .collect();
    if gids.is_empty() {
        // Nobody is known yet, and a connection to no address is refused as such.
        return Ok(());
    }
    let known: Vec<u32> = attacker
        .victims
        .iter()
        .flat_map(|victim| victim.qpns.clone())
        .collect();
    let random = &mut attacker.random;
    for _ in 0..50 {
        let gid = random.of(&gids, [0; 16]);
        let near = random.of(&known, 0).wrapping_add(random.below(512) as u32);
        let any = random.any() as u32;
        let qpn = random.of(&[near, any], near) & 0x00ff_ffff;
        if known.contains(&qpn) {
            continue;
        }
        let mut to = to(qp_type::RC, qpn, gid);
        impatient(&mut to);
        side.qp.set_state(qp_state::RESET)?;
        side.qp.connect(&to)?;
        let (addr, key) = (random.odd(), random.any() as u32);
        side.qp.write(1, &[side.mr.sge(0, 64)], addr, key)?;
        completed("a guess", side.sent()?, &[wc_status::RETRY_EXC_ERR])?;
    }
    Ok(())
}

/// Random datagrams to the general service interfaces of others, and to all of their queue pairs.
fn datagrams_to_everybody(attacker: &mut Attacker) -> Result<()> {
    const GSI_QKEY: u32 = 0x8001_0000;
    let vm = attacker.vm()?;
    let options = SideOptions {
        qp: QpOptions::of(qp_type::UD),
        ..SideOptions::default()
    };
    let side = Side::new(&vm, &options)?;
    side.qp.connect(&Connection::datagram(GSI_QKEY))?;
    let end = Instant::now() + Duration::from_millis(500);
    while Instant::now() < end {
        for victim in &attacker.victims {
            for gid in &victim.gids {
                for qpn in [1].iter().chain(&victim.qpns) {
                    let random = &mut attacker.random;
                    let mut datagram = random.bytes(256);
                    if random.below(2) == 0 {
                        // A MAD of the connection management: base version, class, its version.
                        datagram[..3].copy_from_slice(&[1, 7, 2]);
                    }
                    side.mr.write(0, &datagram);
                    let any = random.any() as u32;
                    let address = Address {
                        dgid: *gid,
                        dmac: [0; 6],
                        qpn: *qpn,
                        qkey: random.of(&[GSI_QKEY, GSI_QKEY, any], GSI_QKEY),
                    };
                    side.qp
                        .post_send(&address.send(1), &[side.mr.sge(0, 256)])?;
                    completed("a datagram", side.sent()?, &[wc_status::SUCCESS])?;
                }
            }
        }
        // So many a second that those who get them are not busy with them alone.
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Finding 5: many queue pairs that send to one that has no receive, and try again for ever.
fn receiver_not_ready(attacker: &mut Attacker) -> Result<()> {
    let vm = attacker.vm()?;
    let mut pairs = Vec::new();
    for _ in 0..150 {
        let pair = Pair::connect(&vm, &vm, &small(), |connection| {
            connection.rnr_retry = 7;
            // 10 µs.
            connection.min_rnr_timer = 1;
        });
        match pair {
            Ok(pair) => pairs.push(pair),
            Err(Error::NoMemory) => break,
            Err(error) => return Err(error.into()),
        }
    }
    for pair in &pairs {
        pair.a.qp.send(1, &[pair.a.mr.sge(0, 64)])?;
    }
    std::thread::sleep(Duration::from_millis(500));
    for pair in &pairs {
        ensure!(
            pair.a.send_cq.poll().is_none(),
            "a message without a receive completed"
        );
    }
    // Those that wait are destroyed.
    Ok(())
}

/// Finding 5: long messages without end on several queue pairs.
fn flood(attacker: &mut Attacker) -> Result<()> {
    let vm = attacker.vm()?;
    let size = 1 << 20;
    let options = SideOptions {
        memory: size,
        ..SideOptions::default()
    };
    let mut pairs = Vec::new();
    for _ in 0..6 {
        pairs.push(Pair::connect(&vm, &vm, &options, |_| ())?);
    }
    let end = Instant::now() + Duration::from_millis(700);
    let mut outstanding = vec![0_u32; pairs.len()];
    while Instant::now() < end {
        for (pair, outstanding) in pairs.iter().zip(&mut outstanding) {
            let (a, b) = (&pair.a, &pair.b);
            while *outstanding < 32 {
                let sges = [a.mr.sge(0, size as u32)];
                a.qp.write(1, &sges, b.mr.iova, b.mr.rkey)?;
                *outstanding += 1;
            }
            while let Some(cqe) = a.send_cq.poll() {
                completed("a write", cqe.status, &[wc_status::SUCCESS])?;
                *outstanding -= 1;
            }
        }
    }
    // A command is answered in the middle of it.
    let pd = Pd::new(&vm)?;
    let cq = Cq::new(&vm, 16, 0)?;
    drop((cq, pd));
    vm.kill();
    Ok(())
}
