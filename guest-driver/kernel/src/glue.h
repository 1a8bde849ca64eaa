/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause */
/*
 * What the Rust part needs from the kernel's headers: the types that bindgen describes, and
 * functions around what is inline, a macro, or different from kernel to kernel. No logic of the
 * driver lives on this side.
 */
#ifndef VIRTIO_RDMA_GLUE_H
#define VIRTIO_RDMA_GLUE_H

#include <linux/types.h>
#include <linux/dma-mapping.h>
#include <linux/netdevice.h>
#include <linux/pci.h>
#include <linux/rtnetlink.h>
#include <linux/slab.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>
#include <rdma/ib_cache.h>
#include <rdma/ib_mad.h>
#include <rdma/ib_umem.h>
#include <rdma/ib_verbs.h>
#include <rdma/iw_cm.h>
#include <rdma/uverbs_ioctl.h>
#include <rdma/ib_user_ioctl_cmds.h>

/* Checked against the specification's numbers where these are used. */
enum vrdma_numbers {
	VRDMA_DEVICE_ID = 42,
	VRDMA_FEATURE_RC = 0,
	VRDMA_FEATURE_UD = 1,
	VRDMA_FEATURE_UC = 2,
	VRDMA_FEATURE_SRQ = 3,
	VRDMA_FEATURE_XRC = 4,
	VRDMA_FEATURE_ATOMIC = 5,
	VRDMA_FEATURE_MW = 6,
	VRDMA_FEATURE_REREG_MR = 7,
	VRDMA_FEATURE_RESIZE_CQ = 8,
	VRDMA_FEATURE_CQ_TIMESTAMP = 9,
	VRDMA_FEATURE_FLUSH = 10,
	VRDMA_FEATURE_PHYSICAL_MR = 11,
	VRDMA_FEATURE_SRQ_RESIZE = 12,
	VRDMA_FEATURE_CQ_MODERATION = 13,
	VRDMA_FEATURE_FAST_REG = 14,
	VRDMA_FEATURE_PORT_STATE = 15,
	VRDMA_FEATURE_HEADER_TYPE = 16,
	VRDMA_FEATURE_COUNTERS = 17,
	VRDMA_FEATURE_SRD = 18,
	VRDMA_FEATURE_IWARP = 19,
	VRDMA_FEATURES = 20,
	VRDMA_EVENT_QUEUE = 1,
	VRDMA_FIRST_COMPLETION_QUEUE = 2,
	VRDMA_MAX_QUEUES = 64,
	VRDMA_PAGE_SIZE = PAGE_SIZE,
	VRDMA_CORE_CAPS = RDMA_CORE_PORT_IBA_ROCE_UDP_ENCAP,
	VRDMA_CORE_CAPS_IWARP = RDMA_CORE_PORT_IWARP,
	VRDMA_MAD_SIZE = IB_MGMT_MAD_SIZE,
	VRDMA_CQ_TIMESTAMPS = IB_UVERBS_CQ_FLAGS_TIMESTAMP_COMPLETION,
	/* Of the driver's own in the ioctl interface. */
	VRDMA_DRIVER_ATTR = 1 << UVERBS_ID_NS_SHIFT,
	VRDMA_METHOD_DM_QUERY = 1 << UVERBS_ID_NS_SHIFT,
	VRDMA_DM_QUERY_RESPONSE,
};

/* How a process maps device memory. */
struct vrdma_dm_info {
	u8 bytes[16];
};

/* Something that `rdma resource show` tells of an object. */
struct vrdma_detail {
	const char *name;
	u32 value;
};

/* Entry points, in Rust. */
int vrdma_probe(struct virtio_device *vdev);
void vrdma_remove(struct virtio_device *vdev);
void vrdma_config_changed(struct virtio_device *vdev);
void vrdma_shutdown(struct virtio_device *vdev);
int vrdma_freeze(struct virtio_device *vdev);
int vrdma_restore(struct virtio_device *vdev);
void vrdma_vq_callback(struct virtqueue *vq);
void vrdma_dm_response(struct ib_dm *dm, struct vrdma_dm_info *to);

struct module *vrdma_this_module(void);
__noreturn void vrdma_panic(void);
void vrdma_log_error(struct device *dev, const char *text, size_t length, s64 number);
void vrdma_log_errno(struct device *dev, const char *text, size_t length, int error);
void vrdma_log_warning(struct device *dev, const char *text, size_t length);
void vrdma_log_info(struct device *dev, const char *text, size_t length, s64 number);

/* Memory. Without `may_sleep` for any context. */
void *vrdma_kzalloc(size_t size, bool may_sleep);
void *vrdma_kvzalloc(size_t count, size_t size, bool may_sleep);
void vrdma_dma_unlimited(struct device *dev);
void *vrdma_page_alloc(struct device *dev, dma_addr_t *addr, bool may_sleep);
void vrdma_page_free(struct device *dev, void *page, dma_addr_t addr);
bool vrdma_page_is_physical(void *page, dma_addr_t addr);
void *vrdma_pages_map(void *const *pages, size_t count);
void vrdma_pages_unmap(void *mapped);

/* Synchronization: each object is allocated, so that it never moves. */
enum vrdma_lock {
	VRDMA_LOCK_COMMANDS,
	VRDMA_LOCK_DYING,
	VRDMA_LOCK_OBJECT,
	VRDMA_LOCK_CQ,
	VRDMA_LOCK_SEND,
	VRDMA_LOCK_RECV,
	VRDMA_LOCK_REGION,
	VRDMA_LOCK_CONNECTIONS,
	VRDMA_LOCKS
};

spinlock_t *vrdma_spinlock_new(enum vrdma_lock which);
unsigned long vrdma_spinlock_lock(spinlock_t *lock);
void vrdma_spinlock_unlock(spinlock_t *lock, unsigned long flags);
struct mutex *vrdma_mutex_new(enum vrdma_lock which);
void vrdma_mutex_lock(struct mutex *lock);
void vrdma_mutex_unlock(struct mutex *lock);
struct completion *vrdma_completion_new(void);
bool vrdma_completion_wait(struct completion *done, unsigned int milliseconds);
void vrdma_sleep(unsigned int milliseconds);
u64 vrdma_milliseconds(void);
struct semaphore *vrdma_semaphore_new(int count);

struct vrdma_work;
struct vrdma_work *vrdma_work_new(void (*run)(void *arg), void *arg);
void vrdma_work_schedule(struct vrdma_work *work);
void vrdma_work_free(struct vrdma_work *work);
void vrdma_work_cancel(struct vrdma_work *work);

struct vrdma_rebind;
struct vrdma_rebind *vrdma_rebind_new(struct virtio_device *vdev);
void vrdma_rebind_schedule(struct vrdma_rebind *rebind, unsigned int milliseconds);
void vrdma_rebind_free(struct vrdma_rebind *rebind);

struct xarray *vrdma_table_new(void);
void vrdma_table_free(struct xarray *table);
int vrdma_table_insert(struct xarray *table, u64 index, void *entry);
void vrdma_table_remove(struct xarray *table, u64 index, void *entry);
void *vrdma_table_next(struct xarray *table, unsigned long *index);
unsigned long vrdma_table_lock(struct xarray *table);
void vrdma_table_unlock(struct xarray *table, unsigned long flags);

/* Virtio. */
struct vrdma_notify_capability {
	u64 start; /* physical address of the notification structure */
	u64 length;
	u32 multiplier;
};

bool vrdma_has_feature(const struct virtio_device *vdev, unsigned int bit);
bool vrdma_is_gone(struct virtio_device *vdev);
bool vrdma_needs_reset(struct virtio_device *vdev);
void vrdma_config_read(struct virtio_device *vdev, unsigned int offset, __le32 *to, unsigned int words);
int vrdma_find_vqs(struct virtio_device *vdev, unsigned int total, unsigned int first_doorbell,
		   struct virtqueue **vqs);
void vrdma_del_vqs(struct virtio_device *vdev);
void vrdma_device_ready(struct virtio_device *vdev);
void vrdma_reset(struct virtio_device *vdev);
void vrdma_vq_spread(struct virtqueue *vq, unsigned int index);
int vrdma_vq_add(struct virtqueue *vq, void *out, unsigned int out_length, void *in, unsigned int in_length,
		 void *token);
int vrdma_notify_capability(struct virtio_device *vdev, struct vrdma_notify_capability *found);
int vrdma_notify_offsets(struct virtio_device *vdev, unsigned int total, u16 *offsets);
void vrdma_pci_ids(struct virtio_device *vdev, u32 *vendor, u32 *device, u32 *revision);

/* RDMA core. */
struct ib_device *vrdma_ib_alloc(size_t size, struct device *parent);
struct ib_ucontext *vrdma_udata_context(struct ib_udata *udata);
struct ib_udata *vrdma_attrs_udata(struct uverbs_attr_bundle *attrs);
int vrdma_udata_read(struct ib_udata *udata, void *to, size_t length);
int vrdma_udata_write(struct ib_udata *udata, const void *from, size_t length);
int vrdma_attr_write(struct uverbs_attr_bundle *attrs, const void *from, size_t length);
int vrdma_details_put(struct sk_buff *msg, const struct vrdma_detail *details, size_t count);
struct rdma_hw_stats *vrdma_counters_alloc(void);
int vrdma_counters_set(struct rdma_hw_stats *stats, const u64 *values, size_t count);
#ifdef HAVE_QUERY_PORT_SPEED
/* In units of 100 Mbit/s. */
int vrdma_query_port_speed(struct ib_device *ib, u32 port, u64 *speed);
#endif
/* Performance management: is it a query, and its answer from the first four of the counters. */
bool vrdma_pma_is_query(const struct ib_mad *in);
void vrdma_pma_answer(const struct ib_mad *in, struct ib_mad *out, const u64 *values);
/* Takes back the work that polls a completion queue, if the core polls it so. */
void vrdma_cq_cancel_polling(struct ib_cq *cq);

struct ib_umem *vrdma_umem_get(struct ib_device *ib, u64 addr, size_t length, int access);
struct ib_umem *vrdma_umem_get_cq(struct ib_device *ib, struct uverbs_attr_bundle *attrs, u64 addr, size_t length,
				  int access);
size_t vrdma_umem_blocks(struct ib_umem *umem, unsigned long block);
int vrdma_umem_for_each(struct ib_umem *umem, unsigned long block, int (*each)(void *arg, u64 addr), void *arg);
void vrdma_sg_for_each(struct scatterlist *sg, int count, bool (*each)(void *arg, u64 addr, u32 length), void *arg);
int vrdma_mmap_pages(struct vm_area_struct *vma, void *const *pages, size_t count, bool read_only);
int vrdma_mmap_io(struct ib_ucontext *context, struct vm_area_struct *vma, u64 addr, size_t length,
		  struct rdma_user_mmap_entry *entry);

/* Network interfaces. */
struct vrdma_netdev_watch;
struct vrdma_netdev_watch *vrdma_netdev_watch_new(void (*event)(void *arg, struct net_device *ndev, bool going),
						  void *arg);
int vrdma_netdev_watch_start(struct vrdma_netdev_watch *watch);
void vrdma_netdev_watch_stop(struct vrdma_netdev_watch *watch);
struct net_device *vrdma_netdev_find(const u8 *mac);
bool vrdma_netdev_is_up(struct ib_device *ib);
void vrdma_delete_gids(struct ib_device *ib);
bool vrdma_netdev_mac(struct ib_device *ib, u8 *mac);

/*
 * Connections of iWARP. Addresses are 16 bytes: one of IPv6, or one of IPv4 mapped to that; ports are numbers.
 */
void vrdma_iwarp_setup(struct ib_device *ib);
bool vrdma_address_get(const struct sockaddr_storage *from, u8 *addr, u16 *port);
void vrdma_address_set(struct ib_device *ib, struct sockaddr_storage *to, const u8 *addr, u16 port);
/* Replaces `local` by an address of the paired interface if it is none; `remote` is who talks to it. */
bool vrdma_local_address(struct ib_device *ib, const u8 *remote, u8 *local);

#endif
