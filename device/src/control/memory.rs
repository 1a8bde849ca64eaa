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
        share: tables.footprint.share(backing.footprint()),
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
    // The write lock is the guarantee: whoever used the key holds the lock for reading until its
    // access has ended.
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
        mr.share = tables.footprint.share(pages.footprint());
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
    let region = FastMr::new(body.pd, body.max_pages, form);
    let index = tables.keys.add_fast_region(region)?;
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
