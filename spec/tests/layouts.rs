// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Properties of the layouts: every representation is a value and comes back as it was, fields are
//! where the tables say, and bytes that are missing count as zero.
use std::collections::HashSet;

use proptest::prelude::*;
use virtio_rdma_spec::doorbell::{self, Bit};
use virtio_rdma_spec::layout::Layout;
use virtio_rdma_spec::{command, config, event, iwarp, ring, verbs};

/// For every structure: bytes to value to bytes, both ways of writing and reading, and a cut
/// buffer.
macro_rules! round_trips {
    ($($test:ident: $path:path),* $(,)?) => {
        proptest! {
            $(
                #[test]
                fn $test(bytes in prop::array::uniform32(any::<u8>()), cut in 0usize..160) {
                    type T = $path;
                    let mut full = [0u8; T::SIZE];
                    for (i, b) in full.iter_mut().enumerate() {
                        *b = bytes[i % 32].wrapping_mul((i / 32 + 1) as u8).wrapping_add(i as u8);
                    }
                    let value = T::from_bytes(&full);
                    prop_assert_eq!(value.to_bytes(), full);
                    prop_assert_eq!(T::from_bytes(&value.to_bytes()), value);

                    let mut put = [0xa5u8; T::SIZE + 8];
                    value.put(&mut put);
                    prop_assert_eq!(&put[..T::SIZE], &full[..]);
                    prop_assert_eq!(&put[T::SIZE..], &[0xa5u8; 8][..]);
                    prop_assert_eq!(T::get(&put), value);

                    let cut = cut.min(T::SIZE);
                    let mut extended = full;
                    extended[cut..].fill(0);
                    prop_assert_eq!(T::get(&full[..cut]), T::from_bytes(&extended));
                    let mut short = vec![0u8; cut];
                    value.put(&mut short);
                    prop_assert_eq!(&short[..], &full[..cut]);
                }
            )*
        }

        /// Every structure of the crate has its property above.
        #[test]
        fn all_structures_are_tested() {
            let tested: HashSet<&str> = HashSet::from([$(<$path>::NAME),*]);
            let modules = [config::LAYOUTS, ring::LAYOUTS, event::LAYOUTS, command::LAYOUTS, iwarp::LAYOUTS];
            for (name, ..) in modules.into_iter().flatten() {
                assert!(tested.contains(name), "{name} is not tested");
            }
        }
    };
}

round_trips! {
    config_space: config::Config,
    sge: ring::Sge,
    send_wqe: ring::SendWqe,
    recv_wqe: ring::RecvWqe,
    ud_wqe: ring::UdWqe,
    srd_range: ring::SrdRange,
    bind_mw: ring::BindMw,
    fast_reg: ring::FastReg,
    masked_operands: ring::MaskedOperands,
    srq_record: ring::SrqRecord,
    cqe: ring::Cqe,
    cqe_extension: ring::CqeExtension,
    qp_record: ring::QpRecord,
    cq_record: ring::CqRecord,
    completion_event: event::CompletionEvent,
    async_event: event::AsyncEvent,
    iw_endpoint: iwarp::IwEndpoint,
    iw_connect: iwarp::IwConnect,
    iw_accept: iwarp::IwAccept,
    iw_reject: iwarp::IwReject,
    iw_listen: iwarp::IwListen,
    iw_event: iwarp::IwEvent,
    command_header: command::CommandHeader,
    response_header: command::ResponseHeader,
    page_list: command::PageList,
    address_vector: command::AddressVector,
    qp_attr: command::QpAttr,
    query_device_response: command::QueryDeviceResponse,
    query_port: command::QueryPort,
    query_port_response: command::QueryPortResponse,
    query_counters_response: command::QueryCountersResponse,
    set_gid: command::SetGid,
    set_port_state: command::SetPortState,
    set_status_page: command::SetStatusPage,
    query_clock_response: command::QueryClockResponse,
    create_context: command::CreateContext,
    handle_response: command::HandleResponse,
    handle: command::Handle,
    reg_mr: command::RegMr,
    reg_mr_response: command::RegMrResponse,
    create_cq: command::CreateCq,
    create_qp: command::CreateQp,
    create_qp_response: command::CreateQpResponse,
    modify_qp: command::ModifyQp,
    query_qp_response: command::QueryQpResponse,
    rereg_mr: command::ReregMr,
    alloc_mr: command::AllocMr,
    block: command::Block,
    alloc_mw: command::AllocMw,
    resize_cq: command::ResizeCq,
    modify_cq: command::ModifyCq,
    resize_srq: command::ResizeSrq,
    create_srq: command::CreateSrq,
    create_srq_response: command::CreateSrqResponse,
    modify_srq: command::ModifySrq,
    query_srq_response: command::QuerySrqResponse,
    multicast: command::Multicast,
}

proptest! {
    #[test]
    fn fields_of_a_work_request_are_where_the_table_says(
        opcode: u8, flags: u8, count: u16, imm: u32, wr_id: u64, remote_addr: u64, rkey: u32,
    ) {
        let wqe = ring::SendWqe { opcode, flags, count, imm, wr_id, remote_addr, rkey, ..Default::default() };
        let bytes = wqe.to_bytes();
        let word = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let expected = u64::from(opcode) | u64::from(flags) << 8 | u64::from(count) << 16 | u64::from(imm) << 32;
        prop_assert_eq!(word, expected);
        prop_assert_eq!(&bytes[8..16], &wr_id.to_le_bytes()[..]);
        prop_assert_eq!(&bytes[16..24], &remote_addr.to_le_bytes()[..]);
        prop_assert_eq!(&bytes[24..28], &rkey.to_le_bytes()[..]);
        prop_assert_eq!(&bytes[28..], &[0u8; 20][..]);
    }

    #[test]
    fn a_nested_structure_is_at_its_offset(bytes in prop::array::uniform32(any::<u8>()), qpn: u32) {
        let mut dgid = [0; 16];
        dgid.copy_from_slice(&bytes[..16]);
        let mut modify = command::ModifyQp { qpn, ..Default::default() };
        modify.attr.av.dgid = dgid;
        let raw = modify.to_bytes();
        prop_assert_eq!(&raw[..4], &qpn.to_le_bytes()[..]);
        prop_assert_eq!(&raw[48..64], &dgid[..]);
    }

    #[test]
    fn strides_hold_what_they_are_for(sge in 0u32..40, inline in 0u32..1100) {
        match ring::send_stride(sge, inline) {
            Some(stride) => {
                prop_assert!(stride.is_power_of_two());
                prop_assert!((ring::MIN_SEND_STRIDE..=ring::MAX_WQE_STRIDE).contains(&stride));
                prop_assert!(stride >= 48 + (16 * sge).max(inline));
                prop_assert!(stride == ring::MIN_SEND_STRIDE || stride / 2 < 48 + (16 * sge).max(inline));
            }
            None => prop_assert!(sge > ring::MAX_SGE || inline > ring::MAX_INLINE),
        }
        match ring::recv_stride(sge) {
            Some(stride) => {
                prop_assert!(stride.is_power_of_two());
                prop_assert!((ring::MIN_RECV_STRIDE..=ring::MAX_WQE_STRIDE).contains(&stride));
                prop_assert!(stride >= 16 + 16 * sge);
                prop_assert!(stride == ring::MIN_RECV_STRIDE || stride / 2 < 16 + 16 * sge);
            }
            None => prop_assert!(sge > ring::MAX_SGE),
        }
    }
}

/// The phase of a WQE is in its phase word, and that of a CQE in its own; both words are aligned.
#[test]
fn phase_words_hold_the_phase() {
    let sent = ring::SendWqe {
        flags: ring::PHASE,
        ..Default::default()
    }
    .to_bytes();
    let received = ring::RecvWqe {
        flags: ring::PHASE,
        ..Default::default()
    }
    .to_bytes();
    let completed = ring::Cqe {
        phase: 1,
        ..Default::default()
    }
    .to_bytes();
    let word = |bytes: &[u8], at: usize| u64::get(&bytes[at..]);
    assert_eq!(word(&sent, ring::WQE_PHASE_WORD), 0x8000);
    assert_eq!(word(&received, ring::WQE_PHASE_WORD), 0x8000);
    assert_eq!(word(&completed, ring::CQE_PHASE_WORD), 1 << 56);
    assert_eq!(ring::WQE_PHASE_WORD % 8, 0);
    assert_eq!(ring::CQE_PHASE_WORD % 8, 0);
}

/// Each slot has a bit of its own, within the block, and the levels above announce exactly it.
#[test]
fn doorbell_bits_are_distinct_and_announced() {
    let mut places = HashSet::new();
    for slot in 0..doorbell::SLOTS {
        match doorbell::bit(slot) {
            Some(Bit::Direct { root }) => {
                assert!(slot < doorbell::DIRECT_SLOTS);
                assert_eq!(root, 1 << (16 + slot));
                assert!(places.insert((doorbell::ROOT_OFFSET, root)));
            }
            Some(Bit::Leaf {
                leaf_offset,
                leaf,
                summary_offset,
                summary,
                root,
            }) => {
                let n = slot as usize;
                assert_eq!((leaf_offset, leaf), (4096 + n / 64 * 8, 1 << (n % 64)));
                assert_eq!(
                    (summary_offset, summary),
                    (64 + n / 4096 * 8, 1 << (n / 64 % 64))
                );
                assert_eq!(root, 1 << (n / 4096));
                assert!(
                    leaf_offset + 8 <= doorbell::BLOCK_SIZE
                        && summary_offset + 8 <= doorbell::LEAF_OFFSET
                );
                assert!(places.insert((leaf_offset, leaf)));
            }
            None => panic!("slot {slot} has no bit"),
        }
    }
    assert_eq!(doorbell::bit(doorbell::SLOTS), None);
    assert_eq!(doorbell::bit(u32::MAX), None);
    assert_eq!(
        doorbell::BLOCK_SIZE,
        doorbell::BLOCK_PAGES as usize * virtio_rdma_spec::PAGE_SIZE as usize
    );
    assert!(
        usize::from(config::MAX_QUEUES) * doorbell::STATUS_STRIDE
            <= virtio_rdma_spec::PAGE_SIZE as usize
    );
}

/// Names are found by value, and no group gives two names to one value.
#[test]
fn constants_are_distinct_and_named() {
    for all in [
        command::create_qp_flag::ALL,
        command::gid_type::ALL,
        command::mw_type::ALL,
        command::opcode::ALL,
        command::rereg_flag::ALL,
        command::srq_type::ALL,
        command::status::ALL,
        config::feature::ALL,
        doorbell::worker_status::ALL,
        event::event_type::ALL,
        verbs::access::ALL,
        verbs::flush_level::ALL,
        verbs::flush_type::ALL,
        verbs::mtu::ALL,
        verbs::qp_attr::ALL,
        verbs::qp_state::ALL,
        verbs::qp_type::ALL,
        verbs::send_flag::ALL,
        verbs::vendor_err::ALL,
        verbs::wc_flag::ALL,
        verbs::wc_opcode::ALL,
        verbs::wc_status::ALL,
        verbs::wr_opcode::ALL,
    ] {
        let values: HashSet<u64> = all.iter().map(|(_, v)| *v).collect();
        assert_eq!(values.len(), all.len(), "{all:?}");
    }
    assert_eq!(command::opcode::name(0x50), Some("CREATE_QP"));
    assert_eq!(command::opcode::name(0xffff), None);
    assert_eq!(
        verbs::send_flag::ALL
            .iter()
            .map(|(_, v)| v)
            .fold(0, |a, b| a | b)
            & u64::from(ring::PHASE),
        0
    );
}
