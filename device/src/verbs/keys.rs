// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The table of keys: memory regions and windows, and the check of what a key allows
//! (specification: "Memory regions and keys", "Memory windows").
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, RwLockReadGuard};

use vhost_device_rdma_sync::lock;
use virtio_rdma_spec::ring::BindMw;
use virtio_rdma_spec::verbs::{access, vendor_err};

use super::fast::{FastMr, Lease};
use super::mr::{check_range, Mr};
use super::mw::{Binding, Mw, State};
use super::numbers::{Numbered, Numbers, NUMBERS};
use super::Error;
use crate::footprint::{boxed, Footprint, Share};
use crate::limits::Limits;
use crate::memory::{null, ContiguousRange, GuestMemory, ScatterRange};

/// Why a key does not give access; a `vendor_err` of the specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyError(pub u8);

/// A window cannot be bound, or a key not be invalidated.
pub(super) const CANNOT_BIND: KeyError = KeyError(vendor_err::BIND);

/// No region, and no bound window, has this key.
const UNKNOWN: KeyError = KeyError(vendor_err::KEY_UNKNOWN);

/// The null lkey: of index 0, which no region and no window has.
pub const NULL_LKEY: u32 = 0xff;

/// Access to write, by the VM itself.
const LOCAL_WRITE: u32 = access::LOCAL_WRITE;

/// Access bits that a binding may have. Local writes do not go through windows.
const WINDOW_ACCESS: u32 = access::LOCAL_WRITE
    | access::REMOTE_WRITE
    | access::REMOTE_READ
    | access::REMOTE_ATOMIC
    | access::ZERO_BASED
    | access::FLUSH_GLOBAL;

/// The party that accesses memory.
#[derive(Debug, Clone, Copy)]
pub struct Accessor {
    /// Protection domain.
    pub pd: u32,
    /// The queue pair that a remote access comes to; none: the access is local.
    pub qp: Option<u32>,
}

impl Accessor {
    /// An access to local memory by protection domain `pd`.
    #[must_use]
    pub fn local(pd: u32) -> Self {
        Self { pd, qp: None }
    }

    /// An access of a peer that came to queue pair `qp` of protection domain `pd`.
    #[must_use]
    pub fn remote(pd: u32, qp: u32) -> Self {
        Self { pd, qp: Some(qp) }
    }
}

/// What a key stands for.
#[derive(Debug)]
enum Key {
    Region(Box<Mr>),
    Fast(Box<FastMr>),
    Window(Box<Mw>),
}

/// A region that was taken out.
#[derive(Debug)]
pub struct Removed {
    /// Its protection domain.
    pub pd: u32,
    _key: Key,
}

/// What a key gives access to.
#[derive(Debug)]
enum To<'a> {
    Region(&'a Mr),
    /// A fast region that is registered.
    Fast(Lease<'a>),
    /// Nothing: it is read.
    Zeros,
    /// Nothing: it is written.
    Discarded,
}

/// Leave to access memory.
#[derive(Debug)]
pub struct Grant<'a> {
    to: To<'a>,
    /// What to add to an address to get the region's.
    shift: u64,
    /// Keeps the window as it is.
    _window: Option<RwLockReadGuard<'a, State>>,
}

impl<'a> Grant<'a> {
    /// As much from `addr` on as can be had at once, of at most `max` bytes, which are in the range
    /// that the grant is for.
    ///
    /// # Errors
    /// If the memory is gone.
    #[inline]
    pub fn scattered(&self, addr: u64, max: u64) -> Result<ScatterRange<'_>, KeyError> {
        let addr = addr.wrapping_add(self.shift);
        match &self.to {
            To::Region(mr) => mr.scattered(addr, max),
            To::Fast(lease) => {
                let mr = lease.as_ref().ok_or(KeyError(vendor_err::MEMORY_GONE))?;
                mr.scattered(addr, max)
            }
            To::Zeros => Ok(null::zeros(max).into()),
            To::Discarded => Ok(null::discarded(max).into()),
        }
    }

    /// The same, as far as it is contiguous.
    ///
    /// # Errors
    /// If the memory is gone.
    pub fn range_at(&self, addr: u64, max: u64) -> Result<ContiguousRange<'_>, KeyError> {
        let mut scatter = self.scattered(addr, max)?;
        Ok(scatter.take(usize::MAX))
    }
}

/// The contiguous range that was looked up last, for the next work request, which often names the
/// same. It borrows the table, so it does not outlive a change. It is for one user, who has one
/// protection domain for each kind of access.
#[derive(Debug, Default)]
pub struct CachedRange<'a> {
    key: u32,
    access: u32,
    /// Address of its first byte.
    start: u64,
    /// Empty: nothing was looked up.
    range: ContiguousRange<'a>,
}

impl<'a> CachedRange<'a> {
    /// The access that it was granted for.
    #[inline(always)]
    #[must_use]
    pub fn access(&self) -> u32 {
        self.access
    }

    /// Whether nothing is remembered.
    #[inline(always)]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// What [`Keys::contiguous`] would return, if it was looked up before.
    #[inline(always)]
    #[must_use]
    pub fn recall(
        &self,
        key: u32,
        access: u32,
        addr: u64,
        len: u64,
    ) -> Option<ContiguousRange<'a>> {
        if self.key != key || self.access != access {
            return None;
        }
        self.contiguous(addr, len)
    }

    #[inline(always)]
    fn contiguous(&self, addr: u64, len: u64) -> Option<ContiguousRange<'a>> {
        self.range.get(addr.wrapping_sub(self.start), len)
    }
}

/// As [`Keys::contiguous`], of a region whose key is that in `cached`.
#[inline(never)]
fn remember<'a>(
    mr: &'a Mr,
    cached: &mut CachedRange<'a>,
    key: u32,
    pd: u32,
    access: u32,
    addr: u64,
    len: u64,
) -> Option<ContiguousRange<'a>> {
    mr.check(key, pd, access, addr, len).ok()?;
    let (start, range) = mr.contiguous(addr)?;
    *cached = CachedRange {
        key,
        access,
        start,
        range,
    };
    cached.contiguous(addr, len)
}

/// The table of keys.
#[derive(Debug)]
pub struct Keys {
    /// By index.
    table: Numbers<Key>,
    /// Number of windows.
    mws: u32,
    /// Queue pairs with the indices of the windows of type 2 that they bound.
    bound: Mutex<BTreeSet<(u32, u32)>>,
    max_mrs: u32,
    max_mws: u32,
    /// For the objects. Page lists and the table have their own.
    share: Share,
}

/// What a window takes: itself, and its entry in `Keys::bound`.
pub(crate) const WINDOW: u64 = boxed::<Mw>() + 4 * size_of::<(u32, u32)>() as u64;

impl Numbered for Key {
    #[inline(always)]
    fn number(&self) -> u32 {
        match self {
            Self::Region(mr) => mr.key >> 8,
            Self::Fast(region) => region.index,
            Self::Window(window) => window.index,
        }
    }
}

impl Key {
    /// What the object takes, bytes.
    fn footprint(&self) -> u64 {
        match self {
            Self::Region(_) => boxed::<Mr>(),
            Self::Fast(_) => boxed::<FastMr>(),
            Self::Window(_) => WINDOW,
        }
    }
}

impl Keys {
    /// An empty table.
    #[must_use]
    pub fn new(limits: &Limits) -> Self {
        Self {
            table: Numbers::new(NUMBERS, limits.mrs.saturating_add(limits.mws)),
            mws: 0,
            bound: Mutex::default(),
            max_mrs: limits.mrs,
            max_mws: limits.mws,
            share: Share::default(),
        }
    }

    /// The same table, whose memory and objects are in an account.
    #[must_use]
    pub fn within(self, account: &Footprint) -> Self {
        Self {
            table: self.table.within(account),
            share: account.empty(),
            ..self
        }
    }

    /// What it takes of its account, without what its objects take, bytes.
    #[must_use]
    pub fn footprint(&self) -> u64 {
        self.table.footprint()
    }

    /// Number of windows.
    #[must_use]
    pub fn mws(&self) -> u32 {
        self.mws
    }

    /// Number of regions.
    #[must_use]
    pub fn mrs(&self) -> u32 {
        self.table.len().saturating_sub(self.mws())
    }

    /// All regions but fast ones.
    pub fn regions(&self) -> impl Iterator<Item = &Mr> {
        self.table.iter().filter_map(|(_, key)| match key {
            Key::Region(mr) => Some(&**mr),
            Key::Fast(_) | Key::Window(_) => None,
        })
    }

    /// All fast regions with their indices.
    pub fn fast_regions(&self) -> impl Iterator<Item = (u32, &FastMr)> {
        self.table.iter().filter_map(|(index, key)| match key {
            Key::Fast(region) => Some((index, &**region)),
            Key::Region(_) | Key::Window(_) => None,
        })
    }

    /// Adds the region that `make` makes of its index.
    ///
    /// # Errors
    /// [`Error::NoMemory`] if there are too many.
    pub fn add_region(&mut self, make: impl FnOnce(u32) -> Mr) -> Result<u32, Error> {
        if self.mrs() >= self.max_mrs {
            return Err(Error::NoMemory);
        }
        self.add(boxed::<Mr>(), |index| Key::Region(Box::new(make(index))))
    }

    /// Adds the fast region that `make` makes of its index.
    ///
    /// # Errors
    /// [`Error::NoMemory`] if there are too many regions.
    pub fn add_fast_region(&mut self, make: impl FnOnce(u32) -> FastMr) -> Result<u32, Error> {
        if self.mrs() >= self.max_mrs {
            return Err(Error::NoMemory);
        }
        self.add(boxed::<FastMr>(), |index| Key::Fast(Box::new(make(index))))
    }

    /// Adds the window that `make` makes of its index.
    ///
    /// # Errors
    /// [`Error::NoMemory`] if there are too many.
    pub fn add_window(&mut self, make: impl FnOnce(u32) -> Mw) -> Result<u32, Error> {
        if self.mws() >= self.max_mws {
            return Err(Error::NoMemory);
        }
        let index = self.add(WINDOW, |index| Key::Window(Box::new(make(index))))?;
        self.mws += 1;
        Ok(index)
    }

    /// Adds an object that takes so many bytes.
    fn add(&mut self, bytes: u64, make: impl FnOnce(u32) -> Key) -> Result<u32, Error> {
        self.share.grow(bytes)?;
        let added = self.table.insert_with(|index| Ok(make(index)));
        added.inspect_err(|_| self.share.release(bytes))
    }

    fn remove(&mut self, index: u32) -> Option<Key> {
        let removed = self.table.remove(index)?;
        self.share.release(removed.footprint());
        Some(removed)
    }

    /// The region of a key.
    #[must_use]
    pub fn region(&self, key: u32) -> Option<&Mr> {
        match self.table.get(key >> 8) {
            Some(Key::Region(mr)) if mr.key == key => Some(mr),
            _ => None,
        }
    }

    /// The only region that can have a key. It may have another one: the check of an access compares
    /// the keys, so that a comparison of indices before it is saved.
    #[inline(always)]
    fn candidate(&self, key: u32) -> Option<&Mr> {
        match self.table.candidate(key >> 8) {
            Some(Key::Region(mr)) => Some(mr),
            _ => None,
        }
    }

    /// The fast region of a key, whatever the lowest 8 bits of that are.
    #[must_use]
    pub fn fast_region(&self, key: u32) -> Option<&FastMr> {
        match self.table.get(key >> 8) {
            Some(Key::Fast(region)) => Some(region),
            _ => None,
        }
    }

    /// The region of a key, to change it.
    pub fn region_mut(&mut self, key: u32) -> Option<&mut Mr> {
        match self.table.get_mut(key >> 8) {
            Some(Key::Region(mr)) if mr.key == key => Some(mr),
            _ => None,
        }
    }

    /// Takes a region out; a fast one whatever the lowest 8 bits of its key are by now.
    ///
    /// # Errors
    /// [`Error::NotFound`], or [`Error::Busy`] while windows are bound to it.
    pub fn remove_region(&mut self, key: u32) -> Result<Removed, Error> {
        let (pd, mr) = match self.table.get_mut(key >> 8) {
            Some(Key::Region(mr)) if mr.key == key => (mr.pd, Some(&mut **mr)),
            Some(Key::Fast(region)) => (region.pd, region.get_mut()),
            _ => return Err(Error::NotFound),
        };
        if mr.is_some_and(|mr| *mr.windows.get_mut() != 0) {
            return Err(Error::Busy);
        }
        let _key = self.remove(key >> 8).ok_or(Error::NotFound)?;
        Ok(Removed { pd, _key })
    }

    /// Takes a window out, whatever the lowest 8 bits of its key are by now.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn remove_window(&mut self, key: u32) -> Result<Mw, Error> {
        let index = key >> 8;
        let Some(Key::Window(mw)) = self.table.get(index) else {
            return Err(Error::NotFound);
        };
        self.unbind(index, &mut mw.state_mut());
        match self.remove(index) {
            Some(Key::Window(mw)) => {
                self.mws -= 1;
                Ok(*mw)
            }
            _ => Err(Error::NotFound),
        }
    }

    /// Takes everything out.
    pub fn clear(&mut self) {
        self.mws = 0;
        self.bound().clear();
        self.table.clear();
        self.share.shrink(0);
    }

    /// Finds the memory of all regions anew after a change of the memory table.
    pub fn rebase(&mut self, memory: Option<&GuestMemory>) {
        for key in self.table.iter_mut() {
            match key {
                Key::Region(mr) => mr.rebase(memory),
                Key::Fast(region) => region.rebase(memory),
                Key::Window(_) => {}
            }
        }
    }

    /// Checks that `accessor` may access `len` bytes at `addr` by `key` as `access` says.
    ///
    /// # Errors
    /// The reason, where not.
    #[inline(always)]
    pub fn grant(
        &self,
        key: u32,
        accessor: Accessor,
        access: u32,
        addr: u64,
        len: u64,
    ) -> Result<Grant<'_>, KeyError> {
        // Every message comes here, and seldom for anything else than a region.
        if let Some(mr) = self.candidate(key).filter(|mr| mr.key == key) {
            mr.check(key, accessor.pd, access, addr, len)?;
            return Ok(Grant {
                to: To::Region(mr),
                shift: 0,
                _window: None,
            });
        }
        self.grant_other(key, accessor, access, addr, len)
    }

    /// The `len` bytes at `addr` that protection domain `pd` may access by `key` as `access` says,
    /// if they are in one contiguous range of a region, which then is in `cached`.
    #[inline(always)]
    #[must_use]
    pub fn contiguous<'a>(
        &'a self,
        cached: &mut CachedRange<'a>,
        key: u32,
        pd: u32,
        access: u32,
        addr: u64,
        len: u64,
    ) -> Option<ContiguousRange<'a>> {
        let Some(Key::Region(mr)) = self.table.candidate(key >> 8) else {
            return None;
        };
        if cached.key == key {
            return remember(mr, cached, key, pd, access, addr, len);
        }
        // What is used once need not be remembered: most runs are of one message.
        cached.key = key;
        cached.range = ContiguousRange::default();
        mr.whole(key, pd, access, addr, len)
    }

    /// The same for one access, of which nothing is remembered.
    #[inline(never)]
    #[must_use]
    pub fn contiguous_once(
        &self,
        key: u32,
        pd: u32,
        access: u32,
        addr: u64,
        len: u64,
    ) -> Option<ContiguousRange<'_>> {
        let mr = self.candidate(key)?;
        mr.whole(key, pd, access, addr, len)
    }

    /// The same as a scatter range.
    #[inline]
    #[must_use]
    pub fn scattered(
        &self,
        key: u32,
        pd: u32,
        access: u32,
        addr: u64,
        len: u64,
    ) -> Option<ScatterRange<'_>> {
        let Some(Key::Region(mr)) = self.table.candidate(key >> 8) else {
            return None;
        };
        mr.check(key, pd, access, addr, len).ok()?;
        let scatter = mr.scattered(addr, len).ok()?;
        (scatter.len() == len).then_some(scatter)
    }

    #[cold]
    #[inline(never)]
    fn grant_other(
        &self,
        key: u32,
        accessor: Accessor,
        access: u32,
        addr: u64,
        len: u64,
    ) -> Result<Grant<'_>, KeyError> {
        match self.table.get(key >> 8) {
            Some(Key::Window(mw)) => {
                self.grant_window(mw, key, accessor, access, Some((addr, len)))
            }
            Some(Key::Fast(region)) => {
                let lease = region.lease().ok_or(UNKNOWN)?;
                let mr = lease.as_ref().ok_or(UNKNOWN)?;
                mr.check(key, accessor.pd, access, addr, len)?;
                Ok(Grant {
                    to: To::Fast(lease),
                    shift: 0,
                    _window: None,
                })
            }
            // What local accesses are for is told by this flag alone.
            None if key == NULL_LKEY && accessor.qp.is_none() => Ok(Grant {
                to: if access & LOCAL_WRITE == 0 {
                    To::Zeros
                } else {
                    To::Discarded
                },
                shift: 0,
                _window: None,
            }),
            _ => Err(UNKNOWN),
        }
    }

    /// Checks that `accessor` has `access` by `key` to all that the key is for.
    ///
    /// # Errors
    /// The reason, where not.
    pub fn check_whole(&self, key: u32, accessor: Accessor, access: u32) -> Result<(), KeyError> {
        match self.table.get(key >> 8) {
            Some(Key::Region(mr)) => mr.check(key, accessor.pd, access, mr.iova, 0),
            Some(Key::Fast(region)) => {
                let lease = region.lease().ok_or(UNKNOWN)?;
                let mr = lease.as_ref().ok_or(UNKNOWN)?;
                mr.check(key, accessor.pd, access, mr.iova, 0)
            }
            Some(Key::Window(mw)) => self
                .grant_window(mw, key, accessor, access, None)
                .map(|_| ()),
            None => Err(UNKNOWN),
        }
    }

    fn grant_window<'a>(
        &'a self,
        mw: &'a Mw,
        key: u32,
        accessor: Accessor,
        access: u32,
        range: Option<(u64, u64)>,
    ) -> Result<Grant<'a>, KeyError> {
        // Windows are for remote accesses only.
        let qp = accessor.qp.ok_or(UNKNOWN)?;
        let state = mw.state();
        let binding = state.binding.filter(|_| state.key == key).ok_or(UNKNOWN)?;
        if mw.pd != accessor.pd || (mw.type_2 && binding.qp != qp) {
            return Err(KeyError(vendor_err::KEY_PD));
        }
        if binding.access & access != access {
            return Err(KeyError(vendor_err::KEY_ACCESS));
        }
        if let Some((addr, len)) = range {
            check_range(binding.iova, binding.length, addr, len)?;
        }
        let to = match self.table.get(binding.region) {
            Some(Key::Region(mr)) => To::Region(mr),
            // It is registered as long as a window is bound to it.
            Some(Key::Fast(region)) => To::Fast(region.lease().ok_or(UNKNOWN)?),
            _ => return Err(UNKNOWN),
        };
        Ok(Grant {
            to,
            shift: binding.shift,
            _window: Some(state),
        })
    }

    /// Binds a window, as a work request of queue pair `qp` of protection domain `pd` says. Nobody
    /// uses its old binding any longer then.
    ///
    /// # Errors
    /// Where that is not possible: nothing has changed then.
    pub fn bind(&self, bind: &BindMw, pd: u32, qp: u32) -> Result<(), KeyError> {
        let mw = match self.table.get(bind.mw_rkey >> 8) {
            Some(Key::Window(mw)) if mw.pd == pd => mw,
            _ => return Err(CANNOT_BIND),
        };
        let mut state = mw.state_mut();
        if state.key != bind.mw_rkey
            || bind.new_rkey >> 8 != bind.mw_rkey >> 8
            || (mw.type_2 && (state.binding.is_some() || bind.length == 0))
        {
            return Err(CANNOT_BIND);
        }
        let binding = match bind.length {
            0 => None,
            _ => Some(self.binding(bind, pd, qp)?),
        };
        let index = bind.mw_rkey >> 8;
        self.unbind(index, &mut state);
        if let Some(binding) = binding {
            if mw.type_2 {
                self.bound().insert((qp, index));
            }
            state.binding = Some(binding);
        }
        state.key = bind.new_rkey;
        Ok(())
    }

    /// What a window becomes bound to. The region counts it already.
    fn binding(&self, bind: &BindMw, pd: u32, qp: u32) -> Result<Binding, KeyError> {
        if bind.access & !WINDOW_ACCESS != 0 || (bind.reserved, bind.reserved1) != (0, 0) {
            return Err(CANNOT_BIND);
        }
        let writes = access::REMOTE_WRITE | access::REMOTE_ATOMIC;
        let wanted = if bind.access & writes == 0 {
            access::MW_BIND
        } else {
            access::MW_BIND | access::LOCAL_WRITE
        };
        let lease;
        let mr = match self.table.get(bind.mr_lkey >> 8) {
            Some(Key::Region(mr)) => Some(&**mr),
            Some(Key::Fast(region)) => {
                lease = region.lease().ok_or(CANNOT_BIND)?;
                lease.as_ref()
            }
            _ => None,
        };
        let mr = mr.ok_or(CANNOT_BIND)?;
        mr.check(bind.mr_lkey, pd, wanted, bind.mr_addr, bind.length)
            .map_err(|_| CANNOT_BIND)?;
        let iova = if bind.access & access::ZERO_BASED != 0 {
            0
        } else {
            bind.addr
        };
        let binding = Binding {
            region: bind.mr_lkey >> 8,
            qp,
            access: bind.access,
            iova,
            length: bind.length,
            shift: bind.mr_addr.wrapping_sub(iova),
        };
        if !mr.bind() {
            return Err(CANNOT_BIND);
        }
        Ok(binding)
    }

    /// Whether a fast region of protection domain `pd` can be registered with this key, and that
    /// region.
    ///
    /// # Errors
    /// Why not.
    pub fn check_register(&self, key: u32, pd: u32) -> Result<&FastMr, KeyError> {
        let region = self.fast_region(key).ok_or(UNKNOWN)?;
        region.check_free(pd)?;
        Ok(region)
    }

    /// Registers `mr` for the fast region that its key is of, and that can hold it.
    ///
    /// # Errors
    /// Why that cannot be.
    pub fn register(&self, mr: Mr) -> Result<(), KeyError> {
        self.fast_region(mr.key).ok_or(UNKNOWN)?.register(mr)
    }

    /// Whether queue pair `qp` of protection domain `pd`, or its peer, may invalidate `key`.
    ///
    /// # Errors
    /// Where not.
    pub fn check_invalidate(&self, key: u32, pd: u32, qp: u32) -> Result<(), KeyError> {
        match self.table.get(key >> 8) {
            Some(Key::Window(mw)) => may_invalidate(mw, &mw.state(), key, pd, qp),
            Some(Key::Fast(region)) => region.check_invalidate(key, pd),
            _ => Err(CANNOT_BIND),
        }
    }

    /// Whether protection domain `pd` may invalidate the region of `key`.
    ///
    /// # Errors
    /// Where not.
    pub fn check_invalidate_region(&self, key: u32, pd: u32) -> Result<(), KeyError> {
        let region = self.fast_region(key).ok_or(CANNOT_BIND)?;
        region.check_invalidate(key, pd)
    }

    /// Invalidates `key` for queue pair `qp` of protection domain `pd`, or for its peer. Nobody
    /// uses it any longer then. The caller must not have a [`Grant`]: it could wait for itself.
    ///
    /// # Errors
    /// Where that is not possible.
    pub fn invalidate(&self, key: u32, pd: u32, qp: u32) -> Result<(), KeyError> {
        match self.table.get(key >> 8) {
            Some(Key::Window(mw)) => {
                let mut state = mw.state_mut();
                may_invalidate(mw, &state, key, pd, qp)?;
                self.unbind(key >> 8, &mut state);
                Ok(())
            }
            Some(Key::Fast(region)) => region.invalidate(key, pd).map(drop),
            _ => Err(CANNOT_BIND),
        }
    }

    /// Queue pair `qp` is destroyed: what it bound is bound to nothing. Its number may be another's
    /// one day.
    pub fn forget_qp(&self, qp: u32) {
        let mut bound = Vec::new();
        bound.extend(self.bound().range((qp, 0)..=(qp, u32::MAX)).copied());
        for (_, index) in bound {
            if let Some(Key::Window(mw)) = self.table.get(index) {
                self.unbind(index, &mut mw.state_mut());
            }
        }
    }

    /// The last lock to be taken.
    fn bound(&self) -> MutexGuard<'_, BTreeSet<(u32, u32)>> {
        lock(&self.bound)
    }

    /// Window `index`, of which this is the state, is bound to nothing any longer.
    fn unbind(&self, index: u32, state: &mut State) {
        let Some(binding) = state.binding.take() else {
            return;
        };
        self.bound().remove(&(binding.qp, index));
        match self.table.get(binding.region) {
            Some(Key::Region(mr)) => {
                mr.windows.fetch_sub(1, Ordering::Relaxed);
            }
            Some(Key::Fast(region)) => {
                // While a window is bound to it, nobody is about to change it.
                if let Some(mr) = region.lease().as_ref().and_then(|lease| lease.as_ref()) {
                    mr.windows.fetch_sub(1, Ordering::Relaxed);
                }
            }
            _ => {}
        }
    }
}

fn may_invalidate(mw: &Mw, state: &State, key: u32, pd: u32, qp: u32) -> Result<(), KeyError> {
    let bound = state.binding.is_some_and(|binding| binding.qp == qp);
    if mw.type_2 && mw.pd == pd && state.key == key && bound {
        Ok(())
    } else {
        Err(CANNOT_BIND)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{region, Pages};
    use crate::verbs::mr::Backing;
    use proptest::prelude::*;
    use std::sync::atomic::AtomicU32;

    const PD: u32 = 3;
    const QP: u32 = 9;
    const REMOTE: Accessor = Accessor {
        pd: PD,
        qp: Some(QP),
    };
    const READ: u32 = access::REMOTE_READ;
    const WRITE: u32 = access::REMOTE_WRITE;

    fn error<T>(reason: u8) -> Result<T, KeyError> {
        Err(KeyError(reason))
    }

    /// A region of 8 KiB at 0x10000, and a window.
    struct Table {
        keys: Keys,
        mr: u32,
        mw: u32,
    }

    fn table(mr_access: u32, type_2: bool) -> Table {
        let memory = GuestMemory::new(vec![region(0, 2)]).unwrap();
        let mut keys = Keys::new(&Limits::default());
        let mr = keys.add_region(|index| Mr {
            key: index << 8 | 5,
            pd: PD,
            access: mr_access,
            iova: 0x10000,
            length: 0x2000,
            offset: 0,
            windows: AtomicU32::new(0),
            backing: Backing::Pages(Pages::resolve(&memory, &[0, 0x1000], 12).unwrap()),
        });
        let mw = keys.add_window(|index| Mw::new(index << 8, PD, type_2));
        Table {
            mr: mr.unwrap() << 8 | 5,
            mw: mw.unwrap() << 8,
            keys,
        }
    }

    fn usual(type_2: bool) -> Table {
        table(access::MW_BIND | access::LOCAL_WRITE, type_2)
    }

    impl Table {
        /// Binds 0x100 bytes at 0x10800 of the region to the window, at 0x5000.
        fn request(&self) -> BindMw {
            BindMw {
                addr: 0x5000,
                mw_rkey: self.mw,
                length: 0x100,
                access: READ,
                mr_lkey: self.mr,
                mr_addr: 0x10800,
                new_rkey: self.mw | 1,
                ..BindMw::default()
            }
        }

        fn bind(&self, change: impl FnOnce(&mut BindMw)) -> Result<(), KeyError> {
            let mut bind = self.request();
            change(&mut bind);
            self.keys.bind(&bind, PD, QP)
        }

        fn access(
            &self,
            key: u32,
            accessor: Accessor,
            access: u32,
            addr: u64,
        ) -> Result<(), KeyError> {
            self.keys.grant(key, accessor, access, addr, 8).map(|_| ())
        }

        fn bound(&self) -> u32 {
            let mr = self.keys.region(self.mr).unwrap();
            mr.windows.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn a_bound_window_gives_access_to_its_part_and_nothing_else() {
        // D-MW-003, D-MW-006.
        let t = usual(false);
        let key = t.mw | 1;
        assert_eq!(
            t.access(t.mw, REMOTE, READ, 0x5000),
            error(vendor_err::KEY_UNKNOWN)
        );
        t.bind(|_| ()).unwrap();
        let grant = t.keys.grant(key, REMOTE, READ, 0x5000, 0x100).unwrap();
        grant
            .range_at(0x5010, 8)
            .unwrap()
            .word()
            .unwrap()
            .store(77, Ordering::Relaxed);
        drop(grant);
        let whole = t
            .keys
            .grant(t.mr, Accessor::local(PD), 0, 0x10810, 8)
            .unwrap();
        let word = whole.range_at(0x10810, 8).unwrap().word().unwrap();
        assert_eq!(word.load(Ordering::Relaxed), 77);
        for (key, accessor, access, addr, reason) in [
            (t.mw, REMOTE, READ, 0x5000, vendor_err::KEY_UNKNOWN),
            (key, Accessor::local(PD), 0, 0x5000, vendor_err::KEY_UNKNOWN),
            (
                key,
                Accessor::remote(PD + 1, QP),
                READ,
                0x5000,
                vendor_err::KEY_PD,
            ),
            (key, REMOTE, WRITE, 0x5000, vendor_err::KEY_ACCESS),
            (key, REMOTE, READ, 0x4fff, vendor_err::KEY_RANGE),
            (key, REMOTE, READ, 0x50f9, vendor_err::KEY_RANGE),
            (key, REMOTE, READ, 0x10800, vendor_err::KEY_RANGE),
            // The region itself grants nothing to peers.
            (t.mr, REMOTE, READ, 0x10800, vendor_err::KEY_ACCESS),
        ] {
            assert_eq!(t.access(key, accessor, access, addr), error(reason));
        }
        // Any queue pair of the protection domain may use a window of type 1.
        assert_eq!(
            t.access(key, Accessor::remote(PD, QP + 1), READ, 0x5000),
            Ok(())
        );
    }

    #[test]
    fn binds_that_must_not_be_are_refused_and_change_nothing() {
        for type_2 in [false, true] {
            let t = usual(type_2);
            type Change = fn(&mut BindMw);
            let bad: [Change; 10] = [
                |b| b.mw_rkey += 1,
                |b| b.mw_rkey = 0x105,
                |b| b.new_rkey += 0x100,
                |b| b.access |= access::MW_BIND,
                |b| b.reserved = 1,
                |b| b.reserved1 = 1,
                |b| b.mr_lkey += 1,
                |b| b.mr_lkey = b.mw_rkey,
                |b| b.mr_addr = 0x11f01,
                |b| b.length = u64::MAX,
            ];
            for (i, change) in bad.into_iter().enumerate() {
                assert_eq!(t.bind(change), Err(CANNOT_BIND), "{i}");
            }
            let bind = t.request();
            assert_eq!(t.keys.bind(&bind, PD + 1, QP), Err(CANNOT_BIND));
            assert_eq!(t.bound(), 0);
            t.bind(|_| ()).unwrap();
        }
        // What the region does not allow.
        assert_eq!(table(READ, true).bind(|_| ()), Err(CANNOT_BIND));
        let read_only = table(access::MW_BIND, true);
        assert_eq!(read_only.bind(|b| b.access = WRITE), Err(CANNOT_BIND));
        read_only.bind(|_| ()).unwrap();
    }

    #[test]
    fn windows_of_type_1_are_bound_again_and_unbound_with_length_zero() {
        let t = usual(false);
        t.bind(|_| ()).unwrap();
        t.bind(|b| (b.mw_rkey, b.new_rkey, b.addr) = (t.mw | 1, t.mw | 2, 0x9000))
            .unwrap();
        assert_eq!(t.bound(), 1);
        assert_eq!(
            t.access(t.mw | 1, REMOTE, READ, 0x5000),
            error(vendor_err::KEY_UNKNOWN)
        );
        assert_eq!(t.access(t.mw | 2, REMOTE, READ, 0x9000), Ok(()));
        assert_eq!(t.keys.invalidate(t.mw | 2, PD, QP), Err(CANNOT_BIND));
        t.bind(|b| (b.mw_rkey, b.new_rkey, b.length) = (t.mw | 2, t.mw | 3, 0))
            .unwrap();
        assert_eq!(t.bound(), 0);
        for key in [t.mw | 2, t.mw | 3] {
            assert_eq!(
                t.access(key, REMOTE, READ, 0x9000),
                error(vendor_err::KEY_UNKNOWN)
            );
        }
    }

    #[test]
    fn destroying_queue_pairs_costs_nothing_for_the_windows_of_others() {
        const COUNT: u32 = 20_000;
        let mut t = usual(true);
        t.bind(|_| ()).unwrap();
        for _ in 0..COUNT {
            t.keys
                .add_window(|index| Mw::new(index << 8, PD, true))
                .unwrap();
        }
        assert_eq!(t.keys.mws(), COUNT + 1);
        let start = std::time::Instant::now();
        for qp in 0..COUNT {
            t.keys.forget_qp(QP + 1 + qp);
        }
        assert!(start.elapsed() < std::time::Duration::from_secs(2));
        assert_eq!(t.bound(), 1);
    }

    #[test]
    fn windows_of_type_2_belong_to_their_queue_pair_and_are_bound_once() {
        // D-QP-004.
        let t = usual(true);
        let key = t.mw | 1;
        assert_eq!(t.bind(|b| b.length = 0), Err(CANNOT_BIND));
        t.bind(|_| ()).unwrap();
        assert_eq!(
            t.access(key, Accessor::remote(PD, QP + 1), READ, 0x5000),
            error(vendor_err::KEY_PD)
        );
        assert_eq!(t.bind(|b| b.mw_rkey = key), Err(CANNOT_BIND));
        for (key, pd, qp) in [
            (t.mw, PD, QP),
            (key, PD + 1, QP),
            (key, PD, QP + 1),
            (t.mr, PD, QP),
            (0, PD, QP),
        ] {
            assert_eq!(t.keys.check_invalidate(key, pd, qp), Err(CANNOT_BIND));
            assert_eq!(t.keys.invalidate(key, pd, qp), Err(CANNOT_BIND));
        }
        assert_eq!(t.keys.check_invalidate(key, PD, QP), Ok(()));
        assert_eq!(t.keys.invalidate(key, PD, QP), Ok(()));
        assert_eq!(t.keys.invalidate(key, PD, QP), Err(CANNOT_BIND));
        assert_eq!(
            t.access(key, REMOTE, READ, 0x5000),
            error(vendor_err::KEY_UNKNOWN)
        );
        assert_eq!(t.bound(), 0);
        t.bind(|b| (b.mw_rkey, b.new_rkey) = (key, t.mw | 2))
            .unwrap();
        t.keys.forget_qp(QP + 1);
        assert_eq!(t.bound(), 1);
        t.keys.forget_qp(QP);
        assert_eq!(t.bound(), 0);
    }

    #[test]
    fn a_region_stays_while_windows_are_bound_to_it() {
        let mut t = usual(true);
        t.bind(|_| ()).unwrap();
        assert_eq!(t.keys.remove_region(t.mr).err(), Some(Error::Busy));
        assert_eq!(t.keys.remove_window(t.mr).err(), Some(Error::NotFound));
        assert!(t.keys.remove_window(t.mw | 0x77).is_ok());
        assert_eq!((t.keys.mrs(), t.keys.mws()), (1, 0));
        assert_eq!(t.keys.remove_region(t.mw).err(), Some(Error::NotFound));
        assert!(t.keys.remove_region(t.mr).is_ok());
        assert_eq!((t.keys.mrs(), t.keys.mws()), (0, 0));
    }

    #[test]
    fn a_zero_based_window_starts_at_zero() {
        let t = usual(true);
        t.bind(|b| b.access |= access::ZERO_BASED).unwrap();
        assert_eq!(t.access(t.mw | 1, REMOTE, READ, 0xf8), Ok(()));
        assert_eq!(
            t.access(t.mw | 1, REMOTE, READ, 0xf9),
            error(vendor_err::KEY_RANGE)
        );
        assert_eq!(t.keys.check_whole(t.mw | 1, REMOTE, READ), Ok(()));
        assert_eq!(
            t.keys.check_whole(t.mw | 1, REMOTE, WRITE),
            error(vendor_err::KEY_ACCESS)
        );
        assert_eq!(t.keys.check_whole(t.mr, Accessor::local(PD), 0), Ok(()));
    }

    #[test]
    fn an_invalidation_waits_for_accesses_under_way() {
        // D-MW-004.
        let t = usual(true);
        t.bind(|_| ()).unwrap();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let grant = t.keys.grant(t.mw | 1, REMOTE, READ, 0x5000, 8).unwrap();
            scope.spawn(|| {
                t.keys.invalidate(t.mw | 1, PD, QP).unwrap();
                done.store(true, Ordering::SeqCst);
            });
            std::thread::sleep(std::time::Duration::from_millis(50));
            assert!(!done.load(Ordering::SeqCst));
            drop(grant);
        });
        assert!(done.load(Ordering::SeqCst));
    }

    proptest! {
        /// Only ranges within the window pass, and they reach the same bytes of the region.
        #[test]
        fn windows_are_ranges(
            start in 0u64..0x2000, length in 1u64..0x2000, addr: u64, at in 0u64..0x2100, len in 0u64..0x200,
        ) {
            let t = usual(true);
            let fits = start + length <= 0x2000;
            let bound = t.bind(|b| (b.mr_addr, b.length, b.addr) = (0x10000 + start, length, addr));
            prop_assert_eq!(bound.is_ok(), fits);
            if fits {
                let from = addr.wrapping_add(at);
                let granted = t.keys.grant(t.mw | 1, REMOTE, READ, from, len);
                let within = from >= addr && at + len <= length;
                prop_assert_eq!(granted.is_ok(), within);
                if let (Ok(grant), true) = (granted, len > 0) {
                    let range = grant.range_at(from, len).unwrap();
                    prop_assert_eq!(range.len() as u64, len);
                }
            }
        }
    }
}
