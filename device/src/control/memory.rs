// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Commands about memory regions and windows.
use std::sync::atomic::AtomicU32;
use std::sync::Arc;

use virtio_rdma_spec::command::{
    alloc_mr_flag, mw_type, rereg_flag, AllocMr, AllocMw, PageList, RegMr, RegMrResponse, ReregMr,
};
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::verbs::access;

use super::{encode, handle_response, needs, resolve, zero};
use crate::memory::{Form, Pages};
use crate::rnic::Rnic;
use crate::verbs::fast::FastMr;
use crate::verbs::mr::{check_access, Backing, Mr, Range};
use crate::verbs::mw::Mw;
use crate::verbs::Error;

/// Pages of a fast registration, at most.
pub(super) const MAX_FAST_REG_PAGES: u32 = 1 << 20;

pub(super) fn register(rnic: &Arc<Rnic>, body: &RegMr) -> Result<Vec<u8>, Error> {
    zero(body.reserved == [0; 7])?;
    check_access(rnic.vm().features(), body.access)?;
    if rnic.tables().pds.get(body.pd).is_none() {
        return Err(Error::NotFound);
    }
    if body.access & access::PHYSICAL != 0 {
        return register_physical(rnic, body);
    }
    let range = Range {
        iova: body.iova,
        length: body.length,
        offset: body.offset,
    }
    .check(body.access)?;
    zero(range.has_pages(&body.pages))?;
    let pages = resolve(rnic, &body.pages)?;
    insert(rnic, body, &range, Some(pages))
}

/// A region of all guest memory.
fn register_physical(rnic: &Arc<Rnic>, body: &RegMr) -> Result<Vec<u8>, Error> {
    let none = (body.iova, body.length, body.offset) == (0, 0, 0);
    zero(none && body.pages == PageList::default())?;
    zero(body.access & (access::MW_BIND | access::ZERO_BASED) == 0)?;
    let all = Range {
        iova: 0,
        length: u64::MAX,
        offset: 0,
    };
    insert(rnic, body, &all, None)
}

/// Puts a region into the table: of `pages`, or of all guest memory.
fn insert(
    rnic: &Arc<Rnic>,
    body: &RegMr,
    range: &Range,
    pages: Option<Pages>,
) -> Result<Vec<u8>, Error> {
    let mut tables = rnic.tables_mut();
    let tables = &mut *tables;
    if tables.pds.get(body.pd).is_none() {
        return Err(Error::NotFound);
    }
    let backing = match pages {
        Some(pages) => Backing::Pages(tables.present(pages)?),
        None => Backing::Physical(tables.memory.clone()),
    };
    let index = tables.keys.add_region(|index| Mr {
        key: index << 8 | u32::from(body.key),
        pd: body.pd,
        access: body.access,
        iova: range.iova,
        length: range.length,
        offset: range.offset,
        windows: AtomicU32::new(0),
        backing,
    })?;
    if let Some(pd) = tables.pds.get_mut(body.pd) {
        pd.users += 1;
    }
    Ok(keys_response(index << 8 | u32::from(body.key)))
}

fn keys_response(key: u32) -> Vec<u8> {
    encode(
        RegMrResponse {
            lkey: key,
            rkey: key,
        }
        .to_bytes(),
    )
}

pub(super) fn deregister(rnic: &Arc<Rnic>, key: u32) -> Result<Vec<u8>, Error> {
    // The write lock is the guarantee: a worker that uses the key holds the lock for reading until
    // its access has ended.
    let mut tables = rnic.tables_mut();
    let removed = tables.keys.remove_region(key)?;
    if let Some(pd) = tables.pds.get_mut(removed.pd) {
        pd.users = pd.users.saturating_sub(1);
    }
    // To give memory back takes time, which nobody has to wait for.
    drop(tables);
    drop(removed);
    Ok(Vec::new())
}

/// Changes a region: under the write lock, so that everybody sees it wholly before or wholly after
/// the change.
pub(super) fn reregister(rnic: &Arc<Rnic>, body: &ReregMr) -> Result<Vec<u8>, Error> {
    needs(rnic, feature::REREG_MR)?;
    let all = rereg_flag::TRANSLATION | rereg_flag::PD | rereg_flag::ACCESS;
    zero(body.reserved == [0; 15] && body.flags != 0 && body.flags & !all == 0)?;
    let changes = |flag| body.flags & flag != 0;
    let before = {
        let tables = rnic.tables();
        zero(tables.keys.fast_region(body.lkey).is_none())?;
        let mr = tables.keys.region(body.lkey).ok_or(Error::NotFound)?;
        mr.access
    };
    let mut access = before;
    if changes(rereg_flag::ACCESS) {
        check_access(rnic.vm().features(), body.access)?;
        access = body.access;
    }
    zero((access | before) & access::PHYSICAL == 0)?;
    let moved = if changes(rereg_flag::TRANSLATION) {
        let range = Range {
            iova: body.iova,
            length: body.length,
            offset: body.offset,
        }
        .check(access)?;
        zero(range.has_pages(&body.pages))?;
        Some((range, resolve(rnic, &body.pages)?))
    } else {
        None
    };

    // Dropped after the lock: to give memory back takes time, which nobody has to wait for.
    let _replaced;
    let mut tables = rnic.tables_mut();
    let tables = &mut *tables;
    let mr = tables.keys.region_mut(body.lkey).ok_or(Error::NotFound)?;
    if *mr.windows.get_mut() != 0 || mr.access != before {
        return Err(Error::Busy);
    }
    let old_pd = mr.pd;
    let pd = if changes(rereg_flag::PD) {
        body.pd
    } else {
        old_pd
    };
    if tables.pds.get(pd).is_none() {
        return Err(Error::NotFound);
    }
    let moved = match moved {
        Some((range, pages)) => Some((range, tables.present(pages)?)),
        None => None,
    };
    let mr = tables.keys.region_mut(body.lkey).ok_or(Error::NotFound)?;
    mr.key = mr.key & !0xff | u32::from(body.key);
    mr.pd = pd;
    mr.access = access;
    if access & access::ZERO_BASED != 0 {
        mr.iova = 0;
    }
    let key = mr.key;
    if let Some((range, pages)) = moved {
        mr.iova = range.iova;
        mr.length = range.length;
        mr.offset = range.offset;
        _replaced = std::mem::replace(&mut mr.backing, Backing::Pages(pages));
    }
    if let Some(pd) = tables.pds.get_mut(old_pd) {
        pd.users = pd.users.saturating_sub(1);
    }
    if let Some(pd) = tables.pds.get_mut(pd) {
        pd.users += 1;
    }
    Ok(keys_response(key))
}

pub(super) fn allocate_region(rnic: &Arc<Rnic>, body: &AllocMr) -> Result<Vec<u8>, Error> {
    needs(rnic, feature::FAST_REG)?;
    zero(body.reserved == [0; 3] && body.flags & !alloc_mr_flag::BLOCKS == 0)?;
    zero((1..=MAX_FAST_REG_PAGES).contains(&body.max_pages))?;
    let form = if body.flags & alloc_mr_flag::BLOCKS == 0 {
        Form::Pages
    } else {
        Form::Blocks
    };
    let mut tables = rnic.tables_mut();
    let tables = &mut *tables;
    let pd = tables.pds.get_mut(body.pd).ok_or(Error::NotFound)?;
    let index = tables
        .keys
        .add_fast_region(|index| FastMr::new(index, body.pd, body.max_pages, form))?;
    pd.users += 1;
    Ok(keys_response(index << 8 | u32::from(body.key)))
}

pub(super) fn allocate_window(rnic: &Arc<Rnic>, body: &AllocMw) -> Result<Vec<u8>, Error> {
    needs(rnic, feature::MW)?;
    zero(body.reserved == [0; 10] && mw_type::name(body.mw_type).is_some())?;
    let mut tables = rnic.tables_mut();
    let tables = &mut *tables;
    let pd = tables.pds.get_mut(body.pd).ok_or(Error::NotFound)?;
    let key = |index: u32| index << 8 | u32::from(body.key);
    let index = tables
        .keys
        .add_window(|index| Mw::new(key(index), body.pd, body.mw_type == mw_type::TYPE_2))?;
    pd.users += 1;
    Ok(handle_response(key(index)))
}

pub(super) fn deallocate_window(rnic: &Arc<Rnic>, key: u32) -> Result<Vec<u8>, Error> {
    let mut tables = rnic.tables_mut();
    let mw = tables.keys.remove_window(key)?;
    if let Some(pd) = tables.pds.get_mut(mw.pd) {
        pd.users = pd.users.saturating_sub(1);
    }
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use virtio_rdma_spec::command::opcode;
    use virtio_rdma_spec::command::status::{EFAULT, EINVAL, ENOENT, ENOMEM, EOPNOTSUPP};
    use virtio_rdma_spec::PAGE_SIZE;

    use super::super::fixture::{name, Host, TestVm, LIMITS};
    use super::*;
    use crate::verbs::mr::MAX_MR_SIZE;

    const RC: u64 = 1 << feature::RC;

    type Change<T> = fn(&mut T);

    fn registered(vm: &TestVm, good: &RegMr, change: Change<RegMr>) -> Result<u32, &'static str> {
        let mut body = *good;
        change(&mut body);
        vm.register(&body).map(|keys| keys.lkey).map_err(name)
    }

    // D-CMD-004, D-CMD-008.
    #[test]
    fn a_region_is_checked_before_it_is_registered() {
        let vm = Host::new().vm(RC);
        let good = vm.mr_body();
        let before = vm.rnic.tables().footprint.bytes();
        let register = |change| registered(&vm, &good, change);
        assert_eq!(register(|r| r.pd += 1), Err(name(ENOENT)));
        for change in [
            (|r| r.length += 1) as Change<RegMr>,
            |r| r.length = MAX_MR_SIZE + 1,
            |r| r.length = u64::MAX,
            |r| r.offset = 1,
            |r| r.offset = PAGE_SIZE,
            |r| r.offset = u64::MAX,
            |r| r.iova = u64::MAX - PAGE_SIZE,
            |r| r.access = 1 << 30,
            |r| r.access = access::REMOTE_WRITE,
            |r| r.access = access::REMOTE_ATOMIC,
            |r| r.pages.count = 3,
            |r| r.pages.levels = 0,
            |r| r.pages.page_shift = 11,
            |r| r.pages.page_shift = 32,
            |r| r.pages.reserved = 1,
            |r| r.reserved[6] = 1,
        ] {
            assert_eq!(register(change), Err(name(EINVAL)));
        }
        for change in [
            (|r| r.access |= access::ON_DEMAND) as Change<RegMr>,
            |r| r.access |= access::FLUSH_PERSISTENT,
            // Their features were not accepted.
            |r| r.access |= access::MW_BIND,
            |r| r.access |= access::FLUSH_GLOBAL,
            |r| r.access |= access::PHYSICAL,
        ] {
            assert_eq!(register(change), Err(name(EOPNOTSUPP)));
        }
        assert_eq!(register(|r| r.pages.addr = 1 << 40), Err(name(EFAULT)));
        let after = vm.rnic.tables().footprint.bytes();
        assert_eq!(after, before, "nothing is left");
        // The address space ends where it ends, and hints are hints.
        let hints = access::HUGETLB | access::RELAXED_ORDERING;
        let whole = RegMr {
            iova: 0u64.wrapping_sub(good.length),
            access: good.access | hints,
            ..good
        };
        let keys = vm.register(&whole).unwrap();
        assert_eq!((keys.lkey, keys.lkey & 0xff), (keys.rkey, 7));
    }

    /// With ZERO_BASED the address has no meaning, so that none is too high.
    // D-CMD-008.
    #[test]
    fn a_zero_based_region_has_no_address() {
        let vm = Host::new().vm(RC | 1 << feature::REREG_MR);
        let good = vm.mr_body();
        let zero_based = |r: &mut RegMr| {
            r.iova = u64::MAX;
            r.access |= access::ZERO_BASED;
        };
        let key = registered(&vm, &good, zero_based).unwrap();
        assert_eq!(vm.rnic.tables().keys.region(key).unwrap().iova, 0);
        let change = |key, flags, access| {
            let body = ReregMr {
                lkey: key,
                flags,
                access,
                key: 9,
                ..ReregMr::default()
            };
            vm.ask::<_, RegMrResponse>(opcode::REREG_MR, &body)
                .map(|keys| keys.lkey)
                .map_err(name)
        };
        // It stays at zero.
        let key = change(key, rereg_flag::ACCESS, access::LOCAL_WRITE).unwrap();
        assert_eq!(key & 0xff, 9);
        assert_eq!(vm.rnic.tables().keys.region(key).unwrap().iova, 0);
        // And an address goes with ZERO_BASED.
        let key = registered(&vm, &good, |_| ()).unwrap();
        let key = change(key, rereg_flag::ACCESS, access::ZERO_BASED).unwrap();
        assert_eq!(vm.rnic.tables().keys.region(key).unwrap().iova, 0);
        assert_eq!(change(key, 0, 0), Err(name(EINVAL)));
        assert_eq!(change(key, 8, 0), Err(name(EINVAL)));
        assert_eq!(change(key, rereg_flag::ACCESS, 1 << 30), Err(name(EINVAL)));
        assert_eq!(change(key, rereg_flag::PD, 0), Err(name(ENOENT)));
        assert_eq!(change(key ^ 1, rereg_flag::ACCESS, 0), Err(name(ENOENT)));
    }

    // D-CMD-008, D-MR-002.
    #[test]
    fn regions_are_limited_and_deregistered_by_their_whole_key() {
        let vm = Host::new().vm(RC);
        let good = vm.mr_body();
        let before = vm.rnic.tables().footprint.bytes();
        let keys: Vec<_> = (0..LIMITS.mrs)
            .map(|_| registered(&vm, &good, |_| ()).unwrap())
            .collect();
        assert_eq!(registered(&vm, &good, |_| ()), Err(name(ENOMEM)));
        assert_eq!(vm.handle(opcode::DEREG_MR, keys[0] ^ 1), Err(ENOENT));
        for key in keys {
            vm.handle(opcode::DEREG_MR, key).unwrap();
            assert_eq!(vm.handle(opcode::DEREG_MR, key), Err(ENOENT));
        }
        assert_eq!(vm.rnic.tables().footprint.bytes(), before);
        vm.handle(opcode::DESTROY_PD, good.pd).unwrap();
        assert_eq!(vm.rnic.tables().footprint.bytes(), 0);
    }

    /// A VM keeps no more of our memory than its limit, whatever its lists are.
    #[test]
    fn page_lists_are_limited_before_they_are_read() {
        let vm = Host::new().vm(RC);
        let most = LIMITS.footprint(0) / Pages::PAGE_FOOTPRINT;
        let good = vm.mr_body();
        let body = RegMr {
            length: (most + 1) * PAGE_SIZE,
            pages: PageList {
                // Nothing is there.
                addr: 1 << 40,
                count: (most + 1) as u32,
                levels: 3,
                ..good.pages
            },
            ..good
        };
        assert_eq!(vm.register(&body).map_err(name), Err(name(ENOMEM)));
    }

    // D-CMD-008, D-FMR-003.
    #[test]
    fn fast_regions_and_windows_are_checked_and_limited() {
        let features = [feature::FAST_REG, feature::PHYSICAL_MR, feature::MW];
        let features = features.iter().fold(RC, |all, bit| all | 1 << bit);
        let vm = Host::new().vm(features | 1 << feature::REREG_MR);
        let good = AllocMr {
            pd: vm.pd(),
            max_pages: 16,
            key: 3,
            ..AllocMr::default()
        };
        let allocate = |change: Change<AllocMr>| {
            let mut body = good;
            change(&mut body);
            vm.allocate_mr(&body).map(|keys| keys.lkey).map_err(name)
        };
        assert_eq!(allocate(|r| r.pd += 1), Err(name(ENOENT)));
        for change in [
            (|r| r.max_pages = 0) as Change<AllocMr>,
            |r| r.max_pages = MAX_FAST_REG_PAGES + 1,
            |r| r.flags = 2,
            |r| r.reserved[2] = 1,
        ] {
            assert_eq!(allocate(change), Err(name(EINVAL)));
        }
        let key = allocate(|r| r.flags = alloc_mr_flag::BLOCKS).unwrap();
        assert_eq!(key & 0xff, 3);
        let change = ReregMr {
            lkey: key,
            flags: rereg_flag::ACCESS,
            ..ReregMr::default()
        };
        let changed = vm.ask::<_, RegMrResponse>(opcode::REREG_MR, &change);
        assert_eq!(changed.map_err(name), Err(name(EINVAL)));
        // Work requests change the low bits of its key.
        vm.handle(opcode::DEREG_MR, key ^ 0xff).unwrap();

        let window = AllocMw {
            mw_type: mw_type::TYPE_2,
            ..AllocMw {
                pd: good.pd,
                ..AllocMw::default()
            }
        };
        let allocate = |change: Change<AllocMw>| {
            let mut body = window;
            change(&mut body);
            vm.allocate_mw(&body).map(|made| made.handle).map_err(name)
        };
        assert_eq!(allocate(|w| w.pd += 1), Err(name(ENOENT)));
        for change in [
            (|w| w.mw_type = 0) as Change<AllocMw>,
            |w| w.mw_type = 3,
            |w| w.reserved[9] = 1,
        ] {
            assert_eq!(allocate(change), Err(name(EINVAL)));
        }
        let keys: Vec<_> = (0..LIMITS.mws).map(|_| allocate(|_| ()).unwrap()).collect();
        assert_eq!(allocate(|_| ()), Err(name(ENOMEM)));
        vm.handle(opcode::DEALLOC_MW, keys[0] ^ 0xff).unwrap();
        assert_eq!(vm.handle(opcode::DEALLOC_MW, keys[0]), Err(ENOENT));
    }

    // D-CMD-008.
    #[test]
    fn a_region_of_all_memory_says_nothing_of_pages() {
        let vm = Host::new().vm(RC | 1 << feature::PHYSICAL_MR | 1 << feature::MW);
        let good = RegMr {
            pd: vm.pd(),
            access: access::PHYSICAL | access::LOCAL_WRITE,
            ..RegMr::default()
        };
        for change in [
            (|r| r.iova = 1) as Change<RegMr>,
            |r| r.length = 1,
            |r| r.offset = 1,
            |r| r.pages.count = 1,
            |r| r.access |= access::ZERO_BASED,
            |r| r.access |= access::MW_BIND,
        ] {
            assert_eq!(registered(&vm, &good, change), Err(name(EINVAL)));
        }
        registered(&vm, &good, |_| ()).unwrap();
    }
}
