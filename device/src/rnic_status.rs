// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the status says of a VM: its objects, counters and state, for people and programs.
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::Arc;

use serde_json::{json, Map, Value};
use virtio_rdma_spec::verbs::{qp_state, qp_type};

use crate::engine::queue_pair::Qp;
use crate::engine::vm::PacketEvent;
use crate::memory::{Form, GuestMemory};
use crate::rnic::Rnic;
use crate::verbs::cq::Cq;
use crate::verbs::fast::FastMr;
use crate::verbs::gid_policy::mac_text;
use crate::verbs::mr::Mr;
use crate::verbs::srq::Srq;

/// Objects of a kind that the status lists, at most.
const LISTED: usize = 1024;

impl Rnic {
    /// Objects, counters and state, for people and programs.
    #[must_use]
    pub fn status(&self) -> Value {
        // Each list by itself, and not all of a long one: who changes the tables waits meanwhile.
        let qps: Vec<_> = self
            .vm()
            .tables()
            .qps
            .iter()
            .take(LISTED)
            .map(list_qp)
            .collect();
        let cqs: Vec<_> = self
            .vm()
            .tables()
            .cqs
            .iter()
            .take(LISTED)
            .map(list_cq)
            .collect();
        let srqs: Vec<_> = self
            .tables()
            .srqs
            .iter()
            .take(LISTED)
            .map(list_srq)
            .collect();
        let mrs: Vec<_> = self
            .tables()
            .keys
            .regions()
            .take(LISTED)
            .map(list_mr)
            .collect();
        let fast_mrs: Vec<_> = self
            .tables()
            .keys
            .fast_regions()
            .take(LISTED)
            .map(list_fast_mr)
            .collect();
        let named = |(kind, count): (&str, u64)| (kind.to_owned(), json!(count));
        let counts: Map<_, _> = self.counts().map(named).into_iter().collect();
        let tables = self.vm().tables();
        let gids = tables.gids.iter().enumerate().filter_map(|(index, gid)| {
            let gid = std::net::Ipv6Addr::from((*gid)?);
            Some(json!({ "index": index, "gid": gid.to_string() }))
        });
        json!({
            "name": self.settings.name,
            "mac": mac_text(&self.settings.mac),
            "network": self.settings.network,
            "node_guid": format!("{:016x}", self.node_guid),
            "link_up": self.vm().link().is_up(),
            "port_up": self.vm().port_is_up(),
            "running": tables.running,
            "memory_bytes": tables.memory.as_ref().map_or(0, GuestMemory::size),
            "memory_regions": tables.memory.as_ref().map_or(0, GuestMemory::regions),
            "memory_limit_bytes": self.settings.limits.memory(),
            "footprint_bytes": tables.footprint.bytes(),
            "footprint_limit_bytes": tables.footprint.limit(),
            "gids": gids.collect::<Vec<_>>(),
            "counts": counts,
            "counters": self.counters(),
            "qps": qps,
            "cqs": cqs,
            "mrs": mrs,
            "fast_mrs": fast_mrs,
            "srqs": srqs,
        })
    }
}

impl Rnic {
    /// How many objects of each kind there are.
    pub(crate) fn counts(&self) -> [(&'static str, u64); 11] {
        let (listeners, connections) = self.iwarp().map_or((0, 0), |port| port.counts());
        let tables = self.vm().tables();
        [
            ("contexts", tables.contexts.len().into()),
            ("pds", tables.pds.len().into()),
            ("mrs", tables.keys.mrs().into()),
            ("mws", tables.keys.mws().into()),
            ("cqs", tables.cqs.len().into()),
            ("qps", tables.qps.len().into()),
            ("srqs", tables.srqs.len().into()),
            ("xrcds", tables.xrcds.len().into()),
            ("attachments", tables.multicast.len() as u64),
            ("listeners", listeners as u64),
            ("connections", connections as u64),
        ]
    }

    /// How many queue pairs there are of each type in each state.
    pub(crate) fn queue_pairs(&self) -> BTreeMap<(&'static str, &'static str), u64> {
        type Counts = BTreeMap<(&'static str, &'static str), u64>;
        self.vm().fold_queue_pairs(|counts: &mut Counts, qp| {
            let kind = qp_type::name(qp.qp_type).unwrap_or("?");
            let state = qp_state::name(qp.state()).unwrap_or("?");
            *counts.entry((kind, state)).or_default() += 1;
        })
    }

    /// What was counted of the VM.
    pub(crate) fn counters(&self) -> Value {
        let vm = self.vm();
        let totals = vm.totals();
        let named = |(name, count): (&str, u64)| (name.to_owned(), json!(count));
        let errors: Map<_, _> = vm.errors().map(named).collect();
        let packets = PacketEvent::ALL.map(|(event, name)| (name, vm.packet_events(event)));
        let packets: Map<_, _> = packets.map(named).into_iter().collect();
        json!({
            "tx_messages": totals.tx_messages,
            "tx_bytes": totals.tx_bytes,
            "rx_messages": totals.rx_messages,
            "rx_bytes": totals.rx_bytes,
            "rnr_naks": totals.rnr_naks,
            "retries": totals.retries,
            "errors": totals.errors,
            "errors_by_status": errors,
            "qkey_violations": totals.qkey_violations,
            "contended_ns": totals.contended_ns,
            "packet_events": packets,
        })
    }
}

fn list_qp((qpn, qp): (u32, &Arc<Qp>)) -> Value {
    let attr = qp.query();
    json!({
        "qpn": qpn,
        "type": qp_type::name(qp.qp_type).unwrap_or("?"),
        "state": qp_state::name(attr.qp_state).unwrap_or("?"),
        "dest_qpn": attr.dest_qp_num,
        "dest_gid": std::net::Ipv6Addr::from(attr.av.dgid).to_string(),
        "pd": qp.pd,
        "send_cq": qp.send_cq.as_ref().map(|cq| cq.number),
        "recv_cq": qp.recv_cq.as_ref().map(|cq| cq.number),
        "srq": qp.srq.as_ref().map(|srq| srq.number),
        "context": qp.context,
        "worker": qp.worker_index,
        "slot": qp.slot,
        "sends": qp.send_queue().position(),
        "receives": qp.responder().position(),
    })
}

fn list_cq((cqn, cq): (u32, &Arc<Cq>)) -> Value {
    json!({
        "cqn": cqn,
        "entries": cq.entries(),
        "vector": cq.vector,
        "completions": cq.position(),
        "users": cq.users.load(Ordering::Relaxed),
        "error": cq.errored(),
    })
}

fn list_srq((srqn, srq): (u32, &Arc<Srq>)) -> Value {
    json!({
        "srqn": srqn,
        "pd": srq.pd,
        "entries": srq.entries(),
        "limit": srq.limit(),
        "receives": srq.position(),
        "xrcd": srq.xrc.as_ref().map(|xrc| xrc.domain),
        "users": srq.users.load(Ordering::Relaxed),
    })
}

/// Without its key and address: with them, those who see the status could reach the memory.
fn list_mr(mr: &Mr) -> Value {
    json!({
        "index": mr.key >> 8,
        "pd": mr.pd,
        "access": mr.access,
        "length": mr.length,
        "pages": mr.backing.count(),
    })
}

fn list_fast_mr((index, region): (u32, &FastMr)) -> Value {
    json!({
        "index": index,
        "pd": region.pd,
        "max_pages": region.max_pages,
        "blocks": region.form == Form::Blocks,
        "registered": region.describe(list_mr),
    })
}
