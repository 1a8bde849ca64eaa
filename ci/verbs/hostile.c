// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A process without privileges against another of its guest: handles, keys and mappings that are
 * not its own.
 */
#define _GNU_SOURCE
#include "verbs-test.h"

#include <fcntl.h>
#include <grp.h>
#include <sys/mman.h>
#include <sys/uio.h>

/* The id of what the other posts. */
#define MAGIC 0x5ec2e75ec2e75ec2ull

/* Objects that the other has and the attacker has not, so that their handles mean nothing to it. */
#define MORE 40

#define NOBODY 65534

/* From root to a user without rights, for good, and a device of its own. */
static void become_nobody(void)
{
	OK(setgroups(0, NULL));
	OK(setgid(NOBODY));
	OK(setuid(NOBODY));
	ctx = open_device();
}

struct foreign {
	uint32_t pd, cq, qp, mr, srq, mw;
	uint32_t lkey, rkey, qpn;
	uint64_t addr;
};

/* What the other has. */
struct owner {
	struct pair p;
	struct ibv_srq *srq;
	struct ibv_mw *mw;
	struct foreign all;
};

static struct owner own_everything(void)
{
	struct owner o;
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 16, .max_sge = 1 } };

	for (int i = 0; i < MORE; i++) {
		struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx));

		MAKE(make_cq(16));
		MAKE(ibv_reg_mr(pd, pages(4096), 4096, ALL));
	}
	o.p = PAIR(.type = IBV_QPT_RC, .one_pd = true);
	o.srq = MAKE(ibv_create_srq(o.p.pd[0], &srq));
	o.mw = MAKE(ibv_alloc_mw(o.p.pd[0], IBV_MW_TYPE_1));
	fill(o.p.mr[1].p, 4096, 7);
	for (int i = 0; i < 8; i++) {
		struct ibv_sge nowhere = { MAGIC, 8, o.p.mr[0].mr->lkey };
		struct ibv_recv_wr *bad, wr = { .wr_id = MAGIC, .sg_list = &nowhere, .num_sge = 1 };

		OK(ibv_post_srq_recv(o.srq, &wr, &bad));
		RECV(o.p.qp[0], MAGIC, &o.p.mr[0], 0, 64);
	}
	o.all = (struct foreign){
		.pd = o.p.pd[0]->handle,
		.cq = o.p.cq[0]->handle,
		.qp = o.p.qp[0]->handle,
		.mr = o.p.mr[1].mr->handle,
		.srq = o.srq->handle,
		.mw = o.mw->handle,
		.lkey = o.p.mr[1].mr->lkey,
		.rkey = o.p.mr[1].mr->rkey,
		.qpn = o.p.qp[0]->qp_num,
		.addr = (uintptr_t)o.p.mr[1].p,
	};
	return o;
}

/* All of it is still there, and as it was. */
static void unharmed(struct owner *o)
{
	struct ibv_srq_attr attr;

	CHECK(filled(o->p.mr[1].p, 4096, 7));
	OK(ibv_query_srq(o->srq, &attr));
	EQ(state_of(o->p.qp[0]), IBV_QPS_RTS);
	POST(o->p.qp[1], .opcode = IBV_WR_SEND, .id = 1, .from = &o->p.mr[1], .length = 64);
	expect_ok(o->p.cq[1], 1, SEND);
	expect_ok(o->p.cq[0], MAGIC, RECV);
	CHECK(filled(o->p.mr[0].p, 64, 7));
	OK(ibv_dealloc_mw(o->mw));
	OK(ibv_destroy_srq(o->srq));
}

/* Lets a process attack what this one has. */
static void attacked_by(void (*attacker)(struct link *link))
{
	pid_t pid;
	/* Before this process has more than what a child may see. */
	struct link *link = child(attacker, &pid);
	struct owner o = own_everything();

	put(link, &o.all, sizeof(o.all));
	meet(link);
	join(pid);
	unharmed(&o);
}

/* A call that has to fail, whatever the reason. */
#define REFUSED(call)									\
	do {										\
		if (RESULT(call) == 0)							\
			fail("success: %s", #call);					\
	} while (0)

/* The same with one of the attacker's own objects that has a foreign handle meanwhile. */
#define FORGED(object, foreign_handle, call)						\
	do {										\
		uint32_t own_ = (object)->handle;					\
		(object)->handle = (foreign_handle);					\
		REFUSED(call);								\
		(object)->handle = own_;						\
	} while (0)
#define FORGED_MAKE(object, foreign_handle, call) FORGED(object, foreign_handle, (call) ? 0 : -1)

static void use_handles(struct link *link)
{
	struct foreign all;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	struct ibv_qp_init_attr init;
	struct ibv_srq_init_attr srq_init = { .attr = { .max_wr = 16, .max_sge = 1 } };
	struct ibv_srq_attr srq_attr = { .srq_limit = 1 };
	union ibv_gid group = group_gid(30);
	struct ibv_ah_attr path;

	become_nobody();
	get(link, &all, sizeof(all));
	struct pair p = PAIR(.type = IBV_QPT_RC, .one_pd = true);
	struct ibv_pd *pd = p.pd[0];
	struct ibv_srq *srq = MAKE(ibv_create_srq(pd, &srq_init));
	uint8_t *memory = pages(4096);

	path = path_to(gid);
	FORGED_MAKE(pd, all.pd, ibv_reg_mr(pd, memory, 4096, ALL));
	FORGED_MAKE(pd, all.pd, ibv_alloc_mw(pd, IBV_MW_TYPE_1));
	FORGED_MAKE(pd, all.pd, ibv_create_ah(pd, &path));
	FORGED_MAKE(pd, all.pd, ibv_create_srq(pd, &srq_init));
	init = (struct ibv_qp_init_attr){
		.send_cq = p.cq[0],
		.recv_cq = p.cq[0],
		.qp_type = IBV_QPT_RC,
		.cap = { 4, 4, 1, 1, 0 },
	};
	FORGED_MAKE(pd, all.pd, ibv_create_qp(pd, &init));
	FORGED_MAKE(p.cq[0], all.cq, ibv_create_qp(pd, &init));
	init.srq = srq;
	FORGED_MAKE(srq, all.srq, ibv_create_qp(pd, &init));
	FORGED(p.cq[0], all.cq, ibv_resize_cq(p.cq[0], 64));
	FORGED(p.qp[0], all.qp, ibv_query_qp(p.qp[0], &attr, IBV_QP_STATE, &init));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_ERR };
	FORGED(p.qp[0], all.qp, ibv_modify_qp(p.qp[0], &attr, IBV_QP_STATE));
	FORGED(p.qp[0], all.qp, ibv_attach_mcast(p.qp[0], &group, 0));
	FORGED(srq, all.srq, ibv_modify_srq(srq, &srq_attr, IBV_SRQ_LIMIT));
	FORGED(srq, all.srq, ibv_query_srq(srq, &srq_attr));
	/* What the attacker imports by a number is not there either. */
	struct ibv_context *imported = MAKE(ibv_import_device(dup(ctx->cmd_fd)));
	struct ibv_pd *guessed = ibv_import_pd(imported, all.pd);
	if (guessed)
		CHECK(!ibv_reg_mr(guessed, memory, 4096, ALL));
	CHECK(!ibv_import_mr(pd, all.mr));
	/* Destroyed last: what a provider does with its own memory then is its own affair. */
	struct ibv_mr *mr = MAKE(ibv_reg_mr(pd, memory, 4096, ALL));
	FORGED(mr, all.mr, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, LOCAL));
	FORGED(mr, all.mr, ibv_dereg_mr(mr));
	FORGED(pd, all.pd, ibv_dealloc_pd(pd));
	FORGED(srq, all.srq, ibv_destroy_srq(srq));
	FORGED(p.qp[1], all.qp, ibv_destroy_qp(p.qp[1]));
	struct ibv_cq *cq = make_cq(16);
	FORGED(cq, all.cq, ibv_destroy_cq(cq));
	meet(link);
	_exit(0);
}

/* G-OBJ-001, G-SEC-002. */
TEST(process_foreign_handles)
{
	attacked_by(use_handles);
}

/* Its keys and the number of its queue pair, in work requests. */
static void use_memory(struct link *link)
{
	struct foreign all;

	become_nobody();
	get(link, &all, sizeof(all));
	for (int i = 0; i < 2; i++) {
		struct conn impatient = conn(0);

		impatient.timeout = 1;
		impatient.retry_cnt = 0;
		struct pair p = PAIR(.type = IBV_QPT_RC);
		struct ibv_sge foreign = { all.addr, 64, all.lkey };

		if (i == 0)
			POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0],
			     .length = 64, .addr = all.addr, .rkey = all.rkey);
		else
			POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .list = &foreign,
			     .num_sge = 1, .to = &p.mr[1]);
		if (i == 0)
			expect_error(p.cq[0], 1, REM_ACCESS_ERR);
		else
			expect_error(p.cq[0], 1, LOC_PROT_ERR);
		/* Of a queue pair that is connected to another. */
		impatient.qpn = all.qpn;
		struct pair q = PAIR(.type = IBV_QPT_RC, .reset = true);

		connect_qp(q.qp[0], &impatient);
		POST(q.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 2, .from = &q.mr[0], .length = 64,
		     .addr = all.addr, .rkey = all.rkey);
		expect_error(q.cq[0], 2, RETRY_EXC_ERR);
	}
	/* Memory that it may not write to is not registered for writing. */
	uint8_t *memory = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int file = open("/proc/self/exe", O_RDONLY);
	uint8_t *program = mmap(NULL, 4096, PROT_READ, MAP_SHARED, file, 0);
	struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx));

	CHECK(memory != MAP_FAILED && program != MAP_FAILED);
	CHECK(!ibv_reg_mr(pd, program, 4096, ALL));
	/* Nor is what is not its own, or not there. */
	CHECK(!ibv_reg_mr(pd, (void *)0xffff888000000000ull, 4096, ALL));
	CHECK(!ibv_reg_mr(pd, (void *)all.addr, SIZE_MAX, ALL));
	OK(munmap(memory, 4096));
	CHECK(!ibv_reg_mr(pd, memory, 4096, ALL));
	meet(link);
	_exit(0);
}

/* G-SEC-002. */
TEST(process_foreign_memory)
{
	attacked_by(use_memory);
}

/* Mappings of the device. */
struct mapping {
	uint8_t *start;
	size_t length;
	off_t offset;
	bool write;
};

#define MAPPINGS 512

static size_t mappings(struct mapping *found)
{
	FILE *file = MAKE(fopen("/proc/self/maps", "r"));
	char line[512];
	size_t count = 0;

	while (fgets(line, sizeof(line), file)) {
		unsigned long start, end, offset;
		char rights[8];

		if (!strstr(line, "uverbs"))
			continue;
		CHECK(sscanf(line, "%lx-%lx %7s %lx", &start, &end, rights, &offset) == 4);
		CHECK(count < MAPPINGS);
		found[count++] = (struct mapping){
			.start = (uint8_t *)start,
			.length = end - start,
			.offset = offset,
			.write = rights[1] == 'w',
		};
	}
	fclose(file);
	return count;
}

/* Copies what is mapped there, as the kernel can of memory; false if these are registers. */
static bool is_memory(const uint8_t *start, size_t length, void *copy)
{
	struct iovec to = { copy, length }, from = { (void *)start, length };

	return process_vm_readv(getpid(), &to, 1, &from, 1, 0) == (ssize_t)length;
}

/* Which page of the machine is mapped there, by a file that root opened. */
static uint64_t frame(int pagemap, const uint8_t *start)
{
	uint64_t entry;
	off_t at = (uintptr_t)start / 4096 * sizeof(entry);

	CHECK(*(const volatile uint8_t *)start || true);
	CHECK(pread(pagemap, &entry, sizeof(entry), at) == sizeof(entry));
	return entry & ((1ull << 55) - 1);
}

#define FRAMES 64

/* Maps a part of the command file; null if that is refused. */
static void *map(size_t length, int protection, int flags, off_t offset)
{
	void *memory = mmap(NULL, length, protection, flags, ctx->cmd_fd, offset);

	return memory == MAP_FAILED ? NULL : memory;
}

/* Whatever may be mapped, at any offset, is not the doorbell memory of the other. */
static void use_mappings(struct link *link)
{
	static struct mapping own[MAPPINGS];
	uint64_t foreign[FRAMES];
	size_t count, could = 0, pages_[] = { 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64 };
	int pagemap = open("/proc/self/pagemap", O_RDONLY);
	long page = sysconf(_SC_PAGESIZE);

	CHECK(pagemap >= 0);
	become_nobody();
	get(link, foreign, sizeof(foreign));
	count = mappings(own);
	CHECK(count > 0);
	for (off_t offset = 0; offset < 512; offset++) {
		for (size_t i = 0; i < sizeof(pages_) / sizeof(*pages_); i++) {
			size_t length = pages_[i] * page;
			uint8_t *memory = map(length, PROT_READ, MAP_SHARED, offset * page);

			if (!memory)
				continue;
			could++;
			for (size_t at = 0; at < length; at += page)
				for (size_t j = 0; j < FRAMES && foreign[j]; j++)
					CHECK(frame(pagemap, memory + at) != foreign[j]);
			munmap(memory, length);
		}
	}
	CHECK(could > 0);
	for (size_t i = 0; i < count; i++) {
		const struct mapping *m = &own[i];

		/* Larger than it is. */
		CHECK(!map(m->length + page, PROT_READ, MAP_SHARED, m->offset));
		/* As a copy of its own. */
		CHECK(!map(m->length, PROT_READ | PROT_WRITE, MAP_PRIVATE, m->offset));
		if (m->write)
			continue;
		/* The status page is for reading, now and later. */
		CHECK(!map(m->length, PROT_READ | PROT_WRITE, MAP_SHARED, m->offset));
		CHECK(mprotect(m->start, m->length, PROT_READ | PROT_WRITE) != 0);
	}
	/* Beyond all. */
	for (int shift = 20; shift < 51; shift++)
		CHECK(!map(page, PROT_READ, MAP_SHARED, (off_t)page << shift));
	meet(link);
	_exit(0);
}

/* G-SEC-001. */
TEST(process_foreign_mappings)
{
	static struct mapping own[MAPPINGS];
	uint64_t frames[FRAMES] = {};
	pid_t pid;
	struct link *link = child(use_mappings, &pid);
	int pagemap = open("/proc/self/pagemap", O_RDONLY);
	size_t count = mappings(own), found = 0;

	CHECK(pagemap >= 0);
	for (size_t i = 0; i < count; i++) {
		uint8_t copy[4096];

		if (!own[i].write)
			continue;
		for (size_t at = 0; at < own[i].length && found < FRAMES; at += 4096)
			if (is_memory(own[i].start + at, 4096, copy))
				frames[found++] = frame(pagemap, own[i].start + at);
	}
	CHECK(found > 0 && frames[0] != 0);
	put(link, frames, sizeof(frames));
	meet(link);
	join(pid);
}

/* Rings many doorbells, and goes with some of them unanswered. */
static void use_doorbells(struct link *link)
{
	become_nobody();
	for (int i = 0; i < 20; i++) {
		struct pair p = PAIR(.type = IBV_QPT_RC);

		for (int j = 0; j < 10; j++)
			POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = j, .from = &p.mr[0],
			     .length = 64, .to = &p.mr[1]);
	}
	meet(link);
	_exit(0);
}

/* Doorbell memory that others had before is handed over zeroed. G-SEC-004. */
TEST(process_fresh_doorbells_are_zero)
{
	static struct mapping before[MAPPINGS], after[MAPPINGS];
	pid_t pid;
	size_t seen = 0;

	for (int round = 0; round < 5; round++) {
		struct link *link = child(use_doorbells, &pid);
		size_t had, count;

		meet(link);
		join(pid);
		had = mappings(before);
		for (int i = 0; i < 4; i++)
			open_device();
		count = mappings(after);
		for (size_t i = 0; i < count; i++) {
			uint8_t copy[4096];
			bool known = !after[i].write;

			for (size_t j = 0; j < had; j++)
				known |= before[j].start == after[i].start;
			for (size_t at = 0; !known && at < after[i].length; at += 4096)
				if (is_memory(after[i].start + at, 4096, copy)) {
					CHECK(all_bytes(copy, 4096, 0));
					seen++;
				}
		}
	}
	CHECK(seen >= 20);
}
